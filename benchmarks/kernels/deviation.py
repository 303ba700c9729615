"""deviation of one layer at the size of Qwen2.5-7B, as a share of the speed at which the card copies.

`python -m benchmarks.kernels.deviation --json benchmarks/results/<machine>`; the sweep says which tiling is best.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.kernels.ceilings import (
    QWEN_7B,
    ROTATION,
    SHIFT,
    TOKENS,
    VLLM_LAYOUTS,
    add_share,
    check_close,
    random_donor,
    random_layers,
    random_pool,
    run_on_card,
    show_tilings,
    time_ms,
    wall_ms,
)
from kernels.deviation import FreshRows, Move, deviation, relative, squares_by_torch
from validation.results import say

if TYPE_CHECKING:
    from kernels.layout import ContiguousKv, PagedKv
    from kernels.moves import Fresh
    from kernels.span_table import Tiling
    from validation.results import Results

LAYER = 2


def measure(results: Results) -> None:
    """Checks some calls against torch, sweeps the tilings, and measures the default one."""
    say(f"relative error against torch: {_check():.1e}")
    _sweep(TOKENS[-1])
    for tokens in TOKENS:
        spans, fresh = [Move(random_donor(tokens), 0, SHIFT, tokens)], random_pool(tokens + 32)
        name = f"deviation_{tokens // 1024}k"
        add_share(results, name, _kernel_ms(spans[0], fresh), _bytes_read(tokens))
        call = wall_ms(lambda spans=spans, fresh=fresh: deviation(spans, fresh, LAYER, ROTATION))  # type: ignore[misc]
        results.add(f"{name}_call_ms", call, "ms", "host clock, checks and launch included")
    tokens = TOKENS[-1]
    for layout in VLLM_LAYOUTS:  # a check's comparison: rows of a forward with what was placed into vLLM's pool
        placed = Move(random_layers(layout, tokens), 0, 0, tokens, turn=0)
        add_share(results, f"deviation_{layout}", _kernel_ms(placed, _rows(tokens)), _bytes_read(tokens))


def _bytes_read(tokens: int) -> int:
    return 2 * tokens * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers


def _rows(tokens: int) -> FreshRows:
    k, v = random_donor(tokens).tensor[LAYER].transpose(1, 2)
    return FreshRows(k, v)


def _kernel_ms(span: Move, fresh: Fresh, tiling: Tiling | None = None) -> float:
    """Milliseconds of the kernel alone, its table ready on the card."""
    from kernels.deviation import triton_deviation

    output = torch.empty(2, span.length, device="cuda")
    tiling = tiling or triton_deviation.DEFAULT
    return time_ms(triton_deviation.prepared(output, [span], fresh, LAYER, ROTATION, tiling))


def _sweep(tokens: int) -> None:
    from kernels.span_table import Tiling

    span, fresh = Move(random_donor(tokens), 0, SHIFT, tokens), random_pool(tokens + 32)
    tilings = (Tiling(4096), Tiling(8192), Tiling(2048, warps=2), Tiling(8192, warps=8))
    show_tilings(f"{tokens} tokens", _bytes_read(tokens), tilings, partial(_kernel_ms, span, fresh))


def _check() -> float:
    errors = []
    donors: list[PagedKv | ContiguousKv] = [random_donor(300), *(random_layers(each, 300) for each in VLLM_LAYOUTS)]
    for donor in donors:
        spans = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
        for fresh in (random_pool(320), _rows(320)):
            expected = relative(squares_by_torch(spans, fresh, LAYER, ROTATION))
            errors.append(check_close("deviation", deviation(spans, fresh, LAYER, ROTATION), expected, 1e-4))
    return max(errors)


if __name__ == "__main__":
    run_on_card("deviation", measure, __doc__)
