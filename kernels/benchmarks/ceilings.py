"""What the card can do at best: device copy, bf16 matrix product, and copies to and from pinned host memory."""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import TYPE_CHECKING

import torch

from kernels.results import Results, parser_of, require_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

COPY_BYTES = 2 << 30
HOST_BYTES = 1 << 30
MATMUL_SIZE = 8192
_BUSY_CYCLES = 2_000_000


def time_ms(function: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> float:
    """Median milliseconds of `function` on the card, between CUDA events on the current stream.

    Before each run the L2 cache is overwritten and the card is kept busy for about a millisecond, so that the host's
    preparation of the run stays out of the figure; `wall_ms` counts it.
    """
    for _ in range(warm_up):
        function()
    flush = _flush_buffer()
    timings = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(_BUSY_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        timings.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in timings))


def wall_ms(function: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> float:
    """Median milliseconds of `function` on the host's clock, from an idle card until the card is idle again."""
    for _ in range(warm_up):
        function()
    timings = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        timings.append((time.perf_counter() - start) * 1e3)
    return statistics.median(timings)


@cache
def copy_gbps(num_bytes: int = COPY_BYTES) -> float:
    """GB/s of a device-to-device copy of random bytes, counting bytes read and written."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / time_ms(lambda: target.copy_(source)) / 1e6


@cache
def matmul_tflops(size: int = MATMUL_SIZE) -> float:
    """TFLOP/s of a bf16 [size, size] x [size, size] product of random matrices."""
    first = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    second = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    output = torch.empty_like(first)
    return 2 * size**3 / time_ms(lambda: torch.mm(first, second, out=output)) / 1e9


@cache
def host_to_device_gbps(num_bytes: int = HOST_BYTES) -> float:
    """GB/s of one copy from pinned host memory to the card."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).fill_(7)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return num_bytes / time_ms(lambda: device.copy_(host, non_blocking=True), repeats=5) / 1e6


@cache
def device_to_host_gbps(num_bytes: int = HOST_BYTES) -> float:
    """GB/s of one copy from the card to pinned host memory."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.full((num_bytes,), 7, dtype=torch.uint8, device="cuda")
    return num_bytes / time_ms(lambda: host.copy_(device, non_blocking=True), repeats=5) / 1e6


@cache
def _flush_buffer() -> torch.Tensor:
    """Four times the L2 cache, so that nothing of an earlier run is left in it."""
    return torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")


def main() -> None:
    """Prints the ceilings, and writes them where `--json` says."""
    arguments = parser_of(__doc__).parse_args()
    require_cuda()
    results = Results()
    results.add(
        "copy_gbps", copy_gbps(), "GB/s", better="higher", baseline=f"copy of {COPY_BYTES} bytes, read + written"
    )
    results.add(
        "matmul_bf16_tflops", matmul_tflops(), "TFLOP/s", better="higher", baseline=f"{MATMUL_SIZE}^3 through torch.mm"
    )
    for name, measure in (("host_to_device", host_to_device_gbps), ("device_to_host", device_to_host_gbps)):
        results.add(f"{name}_gbps", measure(), "GB/s", better="higher", baseline=f"{HOST_BYTES} bytes, pinned")
    results.write(arguments.json, "ceilings")


if __name__ == "__main__":
    main()
