"""EngineExecution: how the engine runs a prompt whose spans are placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import PlanError
from semblend_trt.plan_kinds import AttentionMode, EngineMode

if TYPE_CHECKING:
    from semblend_trt.span_check import SpanCheck


@dataclass(frozen=True, slots=True)
class EngineExecution:
    """How the engine runs the prompt once the spans are placed.

    Layers below `recompute_boundary_layer` are computed for every prompt token; from there on only holes and suffix,
    and the first `head_tokens` tokens of every span that is not exact (EPIC, arXiv 2410.15332). With a `check`, the
    layers below its own are computed for every token as well, and it decides which of the spans' tokens the others
    compute. Exact spans equal a cold run and are computed in no layer.
    """

    mode: EngineMode
    attention: AttentionMode
    num_layers: int
    suffix_start: int
    recompute_boundary_layer: int = 0
    check: SpanCheck | None = None
    head_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_layers < 1 or not 0 <= self.recompute_boundary_layer <= self.num_layers:
            raise PlanError(
                "boundary_outside_model",
                f"recompute boundary {self.recompute_boundary_layer} is outside 0..{self.num_layers}, "
                "the layers of this model",
            )
        if self.recompute_boundary_layer and self.mode is EngineMode.STOCK:
            raise PlanError(
                "boundary_needs_wrapper",
                f"recompute boundary {self.recompute_boundary_layer} needs the engine wrapper; "
                "a stock engine can only skip whole tokens",
            )
        if self.check is not None and self.mode is EngineMode.STOCK:
            raise PlanError(
                "check_needs_wrapper",
                f"check layer {self.check.layer} needs the engine wrapper; a stock engine compares nothing",
            )
        if self.check is not None and self.check.layer >= self.num_layers:
            raise PlanError(
                "check_outside_model", f"check layer {self.check.layer} is outside 0..{self.num_layers - 1}"
            )
        if self.head_tokens < 0:
            raise PlanError("head_tokens_negative", f"head_tokens is {self.head_tokens}; it must be at least 0")
        if self.head_tokens and self.mode is EngineMode.STOCK:
            raise PlanError(
                "head_needs_wrapper",
                f"head_tokens {self.head_tokens} need the engine wrapper; a stock engine can only skip whole tokens",
            )
        if self.suffix_start < 0:
            raise PlanError("suffix_negative", f"suffix_start {self.suffix_start} is negative")

    @property
    def layers_to_recompute(self) -> range:
        """Layers computed for all prompt tokens. Always the lowest ones: a layer needs its input from the one below."""
        return range(self.recompute_boundary_layer)
