"""Plans of a few spans, for tests that need one."""

import numpy as np

from semblend_trt.plan import EngineExecution, EngineMode, PlanKind, SemanticKvPlan


def plan_of(
    *spans,
    request_id=1,
    kind=PlanKind.REQUEST_LOCAL,
    prompt=24,
    computed=0,
    matched=None,
    block_size=8,
    blocks=None,
    mode=EngineMode.WRAPPER,
    layers=3,
    **execution,
):
    """A plan over `prompt` (tokens, or how many of 0, 1, 2 ...) that promises `matched` tokens, or to the last span."""
    if matched is None:
        end = max((span.target_end for span in spans), default=computed)
        matched = 0 if kind is PlanKind.DISCOVERY_ONLY else end - computed
    return SemanticKvPlan(
        request_id=request_id,
        kind=kind,
        spans=spans,
        prompt_token_ids=np.array(range(prompt) if isinstance(prompt, int) else prompt, dtype=np.int32),
        num_computed_tokens=computed,
        matched_tokens=matched,
        block_size=block_size,
        execution=EngineExecution(mode, layers, **execution),
        target_block_ids=blocks,
    )
