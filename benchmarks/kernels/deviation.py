"""deviation of one layer at the size of Qwen2.5-7B, as a share of the speed at which the card copies.

`python -m benchmarks.kernels.deviation --json benchmarks/results/<machine>`
"""

from __future__ import annotations

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
    time_ms,
)
from kernels.deviation import FreshRows, Move, deviation, relative, squares_by_torch
from kernels.layout import ContiguousKv, Fresh, PagedKv
from validation.results import Results, say

LAYER = 2


def measure(results: Results) -> None:
    """Check some calls against torch, and measure the kernel by tokens and by vLLM's layouts."""
    say(f"relative error against torch: {_check():.1e}")
    for tokens in TOKENS:
        span, fresh = Move(random_donor(tokens), 0, SHIFT, tokens), random_pool(tokens + 32)
        add_share(results, f"deviation_{tokens // 1024}k", _kernel_ms(span, fresh), _bytes_read(tokens))
    tokens = TOKENS[-1]
    for layout in VLLM_LAYOUTS:  # a check's comparison: rows of a forward with what was placed into vLLM's pool
        placed = Move(random_layers(layout, tokens), 0, 0, tokens, turn=0)
        add_share(results, f"deviation_{layout}", _kernel_ms(placed, _rows(tokens)), _bytes_read(tokens))


def _bytes_read(tokens: int) -> int:
    return 2 * tokens * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers


def _rows(tokens: int) -> FreshRows:
    k, v = random_donor(tokens).tensor[LAYER].transpose(1, 2)
    return FreshRows(k, v)


def _kernel_ms(span: Move, fresh: Fresh) -> float:
    """Milliseconds of the kernel alone, its table ready on the card."""
    from kernels.deviation import triton_deviation

    output = torch.empty(2, span.length, device="cuda")
    return time_ms(triton_deviation.prepared(output, [span], fresh, LAYER, ROTATION))


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
