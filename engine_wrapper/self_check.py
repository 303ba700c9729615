"""What a self-check runs and compares: an engine's own prompt, computed again by a plan whose span is its own KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from semblend_trt.errors import SemBlendError
from semblend_trt.plan import EngineExecution, EngineMode, PlanKind, PlanSpan, SemanticKvPlan, SpanCheck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import KvGeometry

# Enough for holes, span and suffix of some blocks; and no more memory than a small prompt takes.
MIN_TOKENS, MAX_TOKENS = 64, 512
# Above every deviation, and finite as a threshold must be.
KEEP_ALL = 1e30
# Of ||ours - engine's|| / ||engine's||: above what rounding in another order gives, below what a wrong rotation does.
_BOUNDS = {torch.float32: 1e-3}
_HALF_BOUND = 0.05


class LayoutError(SemBlendError):
    """Plans cannot be executed on this engine; `reason` is the short name under which that is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_plan(
    tokens: Sequence[int], geometry: KvGeometry, layer: int = 0, threshold: float = KEEP_ALL
) -> SemanticKvPlan:
    """A plan checked in `layer`: a hole, a span that keeps its place, and a suffix.

    In the lowest layer every other one runs on some of the rows; by default nothing of the span deviates.
    """
    start, end = len(tokens) // 4, 3 * len(tokens) // 4
    return SemanticKvPlan(
        request_id=0,
        kind=PlanKind.REQUEST_LOCAL,
        spans=(PlanSpan("", start, start, end - start),),
        prompt_token_ids=np.array(tokens, dtype=np.int32),
        num_computed_tokens=0,
        matched_tokens=end,
        block_size=geometry.block_size,
        execution=EngineExecution(EngineMode.WRAPPER, geometry.num_layers, check=SpanCheck(layer, threshold)),
    )


def difference(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """What is wrong with ours, None when they agree."""
    bound = _BOUNDS.get(theirs.dtype, _HALF_BOUND)
    if ours.shape != theirs.shape:
        return f"{what}: ours are {list(ours.shape)}, the engine's {list(theirs.shape)}"
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    # Written so that NaN fails.
    return None if difference <= bound else f"{what} differ from the engine's by {difference:.3g}, above {bound:g}"
