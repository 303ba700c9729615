"""deviation of one layer at the size of Qwen2.5-7B, as a share of the speed at which the card copies.

`python -m kernels.benchmarks.deviation --json benchmarks/results/<machine>`; the sweep says which tiling is best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.benchmarks.ceilings import copy_gbps, time_ms, wall_ms
from kernels.benchmarks.rows import Results, parser, require_cuda, say
from kernels.benchmarks.shapes import QWEN_7B, ROTATION, SHIFT, TOKENS, random_donor, random_pool
from kernels.deviation import FreshRows, Move, deviation, eager

if TYPE_CHECKING:
    from kernels.layout import ContiguousKv, PagedKv

LAYER = 2


def main() -> None:
    """Checks one call against torch, sweeps the tilings, and measures the default one."""
    arguments = parser(__doc__).parse_args()
    require_cuda()
    results = Results()
    say(f"relative error against torch: {_check():.1e}")
    _sweep(TOKENS[-1])
    for tokens in TOKENS:
        donor, fresh = random_donor(tokens), random_pool(tokens + 32)
        milliseconds = _kernel_ms(donor, fresh, tokens)
        speed = _bytes_read(tokens) / milliseconds / 1e6
        name = f"deviation_{tokens // 1024}k"
        baseline = f"{milliseconds:.4f} ms, {speed:.0f} GB/s read; copy {copy_gbps():.0f} GB/s read and written"
        results.add(f"{name}_share_of_copy", speed / copy_gbps(), "", better="higher", baseline=baseline)
        spans = [Move(donor, 0, SHIFT, tokens)]
        call = wall_ms(lambda spans=spans, fresh=fresh: deviation(spans, fresh, LAYER, ROTATION))  # type: ignore[misc]
        results.add(f"{name}_call_ms", call, "ms", better="lower", baseline="host clock, checks and launch included")
    results.write(arguments.json, "deviation")


def _bytes_read(tokens: int) -> int:
    return 2 * tokens * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers


def _kernel_ms(donor: ContiguousKv, fresh: PagedKv, tokens: int, tiling: object = None) -> float:
    """Milliseconds of the kernel alone, its table ready on the card."""
    from kernels.deviation import triton_deviation
    from kernels.kv_move.move import sizes_of, tensor_of
    from kernels.triton_spans import Tiling

    chosen = tiling if isinstance(tiling, Tiling) else triton_deviation.DEFAULT
    table = triton_deviation.table_of([Move(donor, 0, SHIFT, tokens)], fresh, ROTATION, chosen)
    output = torch.empty(2, tokens, device="cuda")
    sizes = sizes_of(donor)
    return time_ms(lambda: triton_deviation.launch(table, tensor_of(fresh), output, LAYER, sizes, ROTATION, chosen))


def _sweep(tokens: int) -> None:
    from kernels.triton_spans import Tiling

    donor, fresh = random_donor(tokens), random_pool(tokens + 32)
    say(f"tilings at {tokens} tokens; copy {copy_gbps():.0f} GB/s")
    for tiling in (Tiling(4096), Tiling(8192), Tiling(2048, warps=2), Tiling(8192, warps=8)):
        milliseconds = _kernel_ms(donor, fresh, tokens, tiling)
        say(f"  {milliseconds:8.4f} ms {_bytes_read(tokens) / milliseconds / 1e6:7.0f} GB/s  {tiling}")


def _check() -> float:
    """A figure counts only if the result is right: the same spans through torch, on the card."""
    donor = random_donor(300)
    kv = random_donor(320).tensor[LAYER].transpose(1, 2)
    spans = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
    errors = []
    for fresh in (random_pool(320), FreshRows(kv[0], kv[1])):
        expected = eager.deviation(spans, fresh, LAYER, ROTATION)
        actual = deviation(spans, fresh, LAYER, ROTATION)
        errors.append(float((actual - expected).norm() / expected.norm()))
    if not max(errors) <= 1e-4:
        raise SystemExit(f"deviation is wrong: relative error {max(errors):.2e} against torch")
    return max(errors)


if __name__ == "__main__":
    main()
