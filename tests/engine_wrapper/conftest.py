"""Plans for slices of the wrapper's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from semblend_trt.plan import (
    AttentionMode,
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    PublicationPolicy,
    SemanticKvPlan,
)

PlanMaker = Callable[..., SemanticKvPlan]


@pytest.fixture(scope="session")
def make_plan() -> PlanMaker:
    def build(
        tokens: Sequence[int],
        spans: Sequence[tuple[int, int]],
        *,
        num_layers: int,
        block_size: int,
        request_id: int = 1,
        boundary: int = 0,
        num_computed: int = 0,
        prefix_end: int | None = None,
        kind: PlanKind = PlanKind.REQUEST_LOCAL_SEGMENTED,
        shift: int = 0,
    ) -> SemanticKvPlan:
        """`spans` are (start, end) in the prompt; `prefix_end` is the last span's end unless given."""
        end = prefix_end if prefix_end is not None else max((end for _, end in spans), default=num_computed)
        return SemanticKvPlan(
            request_id=request_id,
            namespace_key="namespace",
            kind=kind,
            publication=PublicationPolicy.REQUEST_LOCAL,
            spans=tuple(PlanSpan("donor", start + shift, start, stop - start) for start, stop in spans),
            prompt_token_ids=tuple(tokens),
            num_computed_tokens=num_computed,
            matched_tokens=0 if kind is PlanKind.DISCOVERY_ONLY else end - num_computed,
            block_size=block_size,
            execution=EngineExecution(
                EngineMode.WRAPPER, AttentionMode.HOLES_AND_SUFFIX, num_layers, end, recompute_boundary_layer=boundary
            ),
        )

    return build
