"""What a self-check runs and compares: an engine's own prompt, computed again by a plan whose span is its own KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from semblend_trt.plan import (
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
    SpanCheck,
)

if TYPE_CHECKING:
    from kernels.layout import KvGeometry

# Enough for holes, span and suffix of some blocks; and no more memory than a small prompt takes.
MIN_TOKENS, MAX_TOKENS = 64, 512
# Of ||ours - engine's|| / ||engine's||: above what rounding in another order gives, below what a wrong rotation does.
_BOUNDS = {torch.float32: 1e-3}
_HALF_BOUND = 0.05
_KEEP_ALL = 1e30


def check_plan(tokens: list[int], geometry: KvGeometry) -> SemanticKvPlan:
    """A checked plan: a hole, a span that keeps its place, of which nothing deviates, and a suffix."""
    start, end, layers = len(tokens) // 4, 3 * len(tokens) // 4, geometry.num_layers
    check = SpanCheck(0, _KEEP_ALL)  # the lowest layer, so that every other one runs on some of the rows
    execution = EngineExecution(EngineMode.WRAPPER, layers, check=check)
    return SemanticKvPlan(
        request_id=0,
        kind=PlanKind.REQUEST_LOCAL,
        spans=(PlanSpan("", start, start, end - start),),
        prompt_token_ids=tokens,
        num_computed_tokens=0,
        matched_tokens=end,
        block_size=geometry.block_size,
        execution=execution,
    )


def difference(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """What is wrong with ours, None when they agree."""
    bound = _BOUNDS.get(theirs.dtype, _HALF_BOUND)
    if ours.shape != theirs.shape:
        return f"{what}: ours are {list(ours.shape)}, the engine's {list(theirs.shape)}"
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    # Written so that NaN fails.
    return None if difference <= bound else f"{what} differ from the engine's by {difference:.3g}, above {bound:g}"
