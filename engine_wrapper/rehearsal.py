"""A rehearsal: one checked plan, run so that its kernels are compiled before a request needs them."""

from __future__ import annotations

from engine_wrapper.layer_schedule import LayerSchedule, build_schedule
from engine_wrapper.sequence_work import SequenceSlice
from semblend_trt.plan import (
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
    SpanCheck,
)

# A hole, a span and a suffix, each of some tiles of rows.
_SPAN_START, _PREFIX_END, _PROMPT = 64, 384, 512


def rehearsal(num_layers: int, block_size: int, check_layer: int, threshold: float) -> tuple[LayerSchedule, int]:
    """A schedule of a checked plan of 512 tokens, and how many blocks of a pool, from 0 on, it writes."""
    execution = EngineExecution(EngineMode.WRAPPER, num_layers, check=SpanCheck(check_layer, threshold))
    blocks = tuple(range(-(-_PROMPT // block_size)))
    plan = SemanticKvPlan(
        request_id=0,
        kind=PlanKind.REQUEST_LOCAL,
        spans=(PlanSpan("", 0, _SPAN_START, _PREFIX_END - _SPAN_START),),
        prompt_token_ids=(0,) * _PROMPT,
        num_computed_tokens=0,
        matched_tokens=_PREFIX_END,
        block_size=block_size,
        execution=execution,
        target_block_ids=blocks,
    )
    piece = SequenceSlice(0, _PREFIX_END, (0,) * (_PROMPT - _PREFIX_END), blocks, plan)
    return build_schedule([piece], num_layers).last_rows([len(piece.token_ids)]), len(blocks)
