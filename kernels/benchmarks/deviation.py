"""deviation of one layer at the size of Qwen2.5-7B, as a share of the speed at which the card copies.

`python -m kernels.benchmarks.deviation --json benchmarks/results/<machine>`; the sweep says which tiling is best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.benchmarks.ceilings import copy_gbps, time_ms, wall_ms
from kernels.benchmarks.shapes import (
    QWEN_7B,
    ROTATION,
    SHIFT,
    TOKENS,
    VLLM_LAYOUTS,
    random_donor,
    random_layers,
    random_pool,
)
from kernels.deviation import FreshRows, Move, deviation, eager
from kernels.results import Results, parser_of, require_cuda, say

if TYPE_CHECKING:
    from kernels.deviation.spans import Fresh
    from kernels.layout import ContiguousKv, PagedKv

LAYER = 2


def main() -> None:
    """Checks some calls against torch, sweeps the tilings, and measures the default one."""
    arguments = parser_of(__doc__).parse_args()
    require_cuda()
    results = Results()
    say(f"relative error against torch: {_check():.1e}")
    _sweep(TOKENS[-1])
    for tokens in TOKENS:
        donor, fresh = random_donor(tokens), random_pool(tokens + 32)
        milliseconds = _kernel_ms(Move(donor, 0, SHIFT, tokens), fresh)
        speed = _bytes_read(tokens) / milliseconds / 1e6
        name = f"deviation_{tokens // 1024}k"
        baseline = f"{milliseconds:.4f} ms, {speed:.0f} GB/s read; copy {copy_gbps():.0f} GB/s read and written"
        results.add(f"{name}_share_of_copy", speed / copy_gbps(), "", better="higher", baseline=baseline)
        spans = [Move(donor, 0, SHIFT, tokens)]
        call = wall_ms(lambda spans=spans, fresh=fresh: deviation(spans, fresh, LAYER, ROTATION))  # type: ignore[misc]
        results.add(f"{name}_call_ms", call, "ms", baseline="host clock, checks and launch included")
    for layout in VLLM_LAYOUTS:
        _measure_layout(results, layout)
    results.write(arguments.json, "deviation")


def _bytes_read(tokens: int) -> int:
    return 2 * tokens * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers


def _measure_layout(results: Results, layout: str) -> None:
    """A check's comparison: the rows of a forward with what was placed into a pool as vLLM lays it out."""
    tokens = TOKENS[-1]
    milliseconds = _kernel_ms(Move(random_layers(layout, tokens), 0, 0, tokens, turn=0), _rows(tokens))
    speed = _bytes_read(tokens) / milliseconds / 1e6
    baseline = f"{milliseconds:.4f} ms, {speed:.0f} GB/s read; copy {copy_gbps():.0f} GB/s read and written"
    results.add(f"deviation_{layout}_share_of_copy", speed / copy_gbps(), "", better="higher", baseline=baseline)


def _rows(tokens: int) -> FreshRows:
    k, v = random_donor(tokens).tensor[LAYER].transpose(1, 2)
    return FreshRows(k, v)


def _kernel_ms(span: Move, fresh: Fresh, tiling: object = None) -> float:
    """Milliseconds of the kernel alone, its table ready on the card."""
    from kernels.deviation import triton_deviation
    from kernels.kv_move.move import sizes_of, tensor_of
    from kernels.triton_spans import Tiling

    chosen = tiling if isinstance(tiling, Tiling) else triton_deviation.DEFAULT
    table = triton_deviation.table_of([span], fresh, ROTATION, chosen)
    output = torch.empty(2, span.length, device="cuda")
    base = fresh.k if isinstance(fresh, FreshRows) else tensor_of(fresh)
    sizes = sizes_of(span.source)
    return time_ms(lambda: triton_deviation.launch(table, base, output, LAYER, sizes, ROTATION, chosen))


def _sweep(tokens: int) -> None:
    from kernels.triton_spans import Tiling

    donor, fresh = random_donor(tokens), random_pool(tokens + 32)
    say(f"tilings at {tokens} tokens; copy {copy_gbps():.0f} GB/s")
    for tiling in (Tiling(4096), Tiling(8192), Tiling(2048, warps=2), Tiling(8192, warps=8)):
        milliseconds = _kernel_ms(Move(donor, 0, SHIFT, tokens), fresh, tiling)
        say(f"  {milliseconds:8.4f} ms {_bytes_read(tokens) / milliseconds / 1e6:7.0f} GB/s  {tiling}")


def _check() -> float:
    """A figure counts only if the result is right: the same spans through torch, on the card."""
    errors = []
    donors: list[PagedKv | ContiguousKv] = [random_donor(300), *(random_layers(each, 300) for each in VLLM_LAYOUTS)]
    for donor in donors:
        spans = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
        for fresh in (random_pool(320), _rows(320)):
            expected = eager.deviation(spans, fresh, LAYER, ROTATION)
            actual = deviation(spans, fresh, LAYER, ROTATION)
            errors.append(float((actual - expected).norm() / expected.norm()))
    if not max(errors) <= 1e-4:
        raise SystemExit(f"deviation is wrong: relative error {max(errors):.2e} against torch")
    return max(errors)


if __name__ == "__main__":
    main()
