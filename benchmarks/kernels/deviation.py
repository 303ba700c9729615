"""deviation of one layer at the size of Qwen2.5-7B, as a share of the speed at which the card copies.

`python -m benchmarks.kernels.deviation --json benchmarks/results/<machine>`
"""

from __future__ import annotations

import torch

from benchmarks.kernels import ceilings as card
from benchmarks.kernels.ceilings import (
    QWEN_7B,
    ROTATION,
    TOKENS,
    VLLM_LAYOUTS,
    random_donor,
    random_layers,
    random_pool,
)
from kernels.deviation import FreshRows, Move, deviation, relative, squares_by_torch
from kernels.layout import ContiguousKv, Fresh, PagedKv
from validation.results import Results, say

LAYER = 2


def measure(results: Results) -> None:
    """Check some calls against torch, and measure the kernel by tokens and by vLLM's layouts."""
    say(f"relative error against torch: {_check():.1e}")
    for tokens in TOKENS:
        span = Move(random_donor(tokens), 0, card.SHIFT, tokens)
        _add_kernel(results, f"deviation_{tokens // 1024}k", span, random_pool(tokens + 32))
    tokens = TOKENS[-1]
    for layout in VLLM_LAYOUTS:  # a check's comparison: rows of a forward with what was placed into vLLM's pool
        placed = Move(random_layers(layout, tokens), 0, 0, tokens, turn=0)
        _add_kernel(results, f"deviation_{layout}", placed, _rows(tokens))


def _rows(tokens: int) -> FreshRows:
    k, v = random_donor(tokens).tensor[LAYER].transpose(1, 2)
    return FreshRows(k, v)


def _add_kernel(results: Results, name: str, span: Move, fresh: Fresh) -> None:
    """Add the speed of the kernel alone, its table ready on the card."""
    from kernels.deviation import triton_deviation

    output = torch.empty(2, span.length, device="cuda")
    milliseconds = card.time_ms(triton_deviation.prepared(output, [span], fresh, LAYER, ROTATION))
    num_bytes = 2 * span.length * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers
    card.add_share(results, name, milliseconds, num_bytes)


def _check() -> float:
    errors = []
    donors: list[PagedKv | ContiguousKv] = [random_donor(300), *(random_layers(each, 300) for each in VLLM_LAYOUTS)]
    for donor in donors:
        spans = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
        for fresh in (random_pool(320), _rows(320)):
            expected = relative(squares_by_torch(spans, fresh, LAYER, ROTATION))
            errors.append(card.check_close("deviation", deviation(spans, fresh, LAYER, ROTATION), expected, 1e-4))
    return max(errors)


if __name__ == "__main__":
    card.run_on_card("deviation", measure, __doc__)
