"""How fast the disk tier writes and reads donors, beside plain files of as many bytes.

python -m benchmarks.donors.disk --path DIR [--json DIR]

Both sides write all bytes at once, sync and close. Both read into existing memory right after the write, so that they
find the same cache. The tier checks every byte as well.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.program import Count, run_counted, seconds
from kernels.layout import ContiguousKv
from semblend_trt.donors.disk_tier import DiskTier, DonorText, KvForm
from semblend_trt.donors.host_tier import HostKv

if TYPE_CHECKING:
    from validation.results import Results

# The shape of Qwen2.5-7B.
FORM = KvForm(num_layers=28, kv_factor=2, kv_heads=4, head_dim=128, dtype=torch.bfloat16)


def run(tokens: int, repeats: int, results: Results, path: Path) -> None:
    """Adds both rows. Each is the median of `repeats`; its baseline is measured in turn with it."""
    with tempfile.TemporaryDirectory(dir=path) as folder:
        _measure(tokens, repeats, results, Path(folder))


def _measure(tokens: int, repeats: int, results: Results, folder: Path) -> None:
    tier = DiskTier(folder, FORM, folder / "key")
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(28, tokens, 2, 4, 128, generator=generator).to(torch.bfloat16)
    arrived = torch.zeros_like(source)
    text = DonorText("benchmark", np.arange(tokens, dtype=np.int32))
    size, plain = source.numel() * source.element_size(), folder / "plain"
    raw, target = _bytes(source), _bytes(arrived)
    speeds: dict[str, list[float]] = {"plain_write": [], "write": [], "plain_read": [], "read": []}
    for _ in range(repeats):
        speeds["plain_write"].append(size / seconds(_write_plain, plain, raw))
        speeds["plain_read"].append(size / seconds(_read_plain, plain, target))
        plain.unlink()
        speeds["write"].append(size / seconds(tier.write, "donor", text, _held(source)))
        speeds["read"].append(size / seconds(tier.read, "donor", _held(arrived)))
        tier.forget("donor")
    tier.close()
    if not torch.equal(source, arrived):
        raise RuntimeError("the donor that was read back is not the one that was written")
    for what, verb in (("write", "written and synced"), ("read", "read")):
        speed, own = median(speeds[what]) / 1e9, median(speeds[f"plain_{what}"]) / 1e9
        results.add(
            f"donor_disk_{what}_gbs",
            speed,
            "GB/s",
            better="higher",
            baseline=f"a plain file of {size / 1e6:,.0f} MB {verb}: {own:.3g} GB/s, of which this is {speed / own:.2f}",
        )


def _held(memory: torch.Tensor) -> HostKv:
    return HostKv((ContiguousKv(memory.permute(0, 2, 3, 1, 4)),))


def _bytes(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.view(torch.uint8).reshape(-1).numpy())  # type: ignore[arg-type]  # a stub of numpy's


def _write_plain(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def _read_plain(path: Path, target: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while target:
            target = target[file.readinto(target) :]


_COUNTS = [Count("tokens", 8192, "tokens of the donor"), Count("repeats", 5, "times each is measured")]
_PATH = {"type": Path, "default": Path(tempfile.gettempdir()), "help": "folder on the disk measured"}
main = partial(run_counted, "donor_disk", __doc__, _COUNTS, run, path=_PATH)

if __name__ == "__main__":
    main()
