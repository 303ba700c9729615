"""SemanticKvPlan: which donor KV goes where for one request, how it is checked, and who computes the rest.

The constructor refuses every plan that could corrupt KV, so code that receives a plan need not check again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# Tokens of a window, counted from the first checked token of a span; its last window may be shorter.
WINDOW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SpanCheck:
    """Layers below `layer` run on all tokens; in `layer` fresh K and V of every token are compared with its donor's.

    A token's deviation is the larger one of K's and V's, each ||fresh - donor|| / ||donor|| over heads and channels.
    Tokens that deviate by more than `threshold` are computed in all layers; or, with `largest_share` instead, that
    share of the checked tokens which deviates most (CacheBlend, arXiv 2405.16444). Windows whose mean deviation is
    above `window_threshold` are computed as well: where the text means something else, many tokens deviate by little.

    A span of which more than `max_span_share` deviates is computed whole. A plan that would save less than
    `min_saved_share` of its promised tokens is dropped: everything is computed.
    """

    layer: int
    threshold: float | None = None
    largest_share: float | None = None
    max_span_share: float = 1.0
    min_saved_share: float = 0.0
    window_threshold: float | None = None


class EngineMode(str, Enum):
    """Who executes a plan. A plan made for one mode is wrong in the other."""

    STOCK = "stock"
    WRAPPER = "wrapper"


class PlanKind(str, Enum):
    """What a plan does. Only a request-local one may place KV that a cold run would not have produced."""

    DISCOVERY_ONLY = "discovery_only"
    EXACT_PREFIX = "exact_prefix"
    REQUEST_LOCAL = "request_local"


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """`length` tokens of `donor_id`, equal to the prompt's, moved from `donor_start` to `target_start`.

    `exact` says that the donor's text equals the prompt's from position 0 to the end of the span, so that its KV is
    what a cold run would produce.
    """

    donor_id: str
    donor_start: int
    target_start: int
    length: int
    exact: bool = False

    def __post_init__(self) -> None:
        if self.length < 1 or self.donor_start < 0 or self.target_start < 0:
            raise PlanError(
                "span_range",
                f"span of {self.donor_id} has donor_start {self.donor_start}, target_start {self.target_start} and "
                f"length {self.length}; starts must be >= 0 and the length >= 1",
            )
        if self.exact and self.donor_start != self.target_start:
            raise PlanError(
                "exact_span_shifted",
                f"span of {self.donor_id} is marked exact but moves from {self.donor_start} to {self.target_start}; "
                "moved KV is never exact",
            )

    @property
    def donor_end(self) -> int:
        return self.donor_start + self.length

    @property
    def target_end(self) -> int:
        return self.target_start + self.length

    @property
    def shift(self) -> int:
        """Positions by which K has to be rotated; 0 copies it bit for bit."""
        return self.target_start - self.donor_start


@dataclass(frozen=True, slots=True)
class EngineExecution:
    """How the engine runs the prompt once the spans are placed.

    Layers below `recompute_boundary_layer` are computed for every prompt token; from there on only holes and suffix,
    and the first `head_tokens` tokens of every span that is not exact (EPIC, arXiv 2410.15332). With a `check`, the
    layers below its own are computed for every token as well, and it decides which of the spans' tokens the others
    compute. Exact spans equal a cold run and are computed in no layer.
    """

    mode: EngineMode
    num_layers: int
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


@dataclass(frozen=True, slots=True)
class SemanticKvPlan:
    """One request's reuse, decided once on the scheduler and carried to every rank.

    `prompt_token_ids` are the request's own tokens, never a donor's. `num_computed_tokens` leading tokens are the
    engine's exact prefix and are never written. `matched_tokens` is what the executor was promised beyond them.
    `target_block_ids` is None until the engine has allocated blocks for the request. `prompt_token_ids` are
    int32 [n], which nothing changes.
    """

    request_id: int
    kind: PlanKind
    spans: tuple[PlanSpan, ...]
    prompt_token_ids: npt.NDArray[np.int32] = field(compare=False)
    num_computed_tokens: int
    matched_tokens: int
    block_size: int
    execution: EngineExecution
    target_block_ids: tuple[int, ...] | None = None
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_spans(self)
        _check_kind(self)
        _check_blocks(self)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def prefix_end(self) -> int:
        """First position that the executor schedules."""
        return self.num_computed_tokens + self.matched_tokens

    @property
    def reused_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def is_checked(self) -> bool:
        """True when the engine compares tokens with their donors' and leaves evidence; False where none are left to."""
        execution = self.execution
        if execution.check is None or self.kind is PlanKind.DISCOVERY_ONLY:
            return False
        return any(not span.exact and span.length > execution.head_tokens for span in self.spans)

    @property
    def is_exact(self) -> bool:
        """True when every block of the request may be published; a plan that moves nothing changes nothing."""
        return self.kind is not PlanKind.REQUEST_LOCAL

    @property
    def exact_token_count(self) -> int:
        """Leading tokens whose KV equals a cold run's: everything before the first placed span that is not exact."""
        if self.kind is PlanKind.DISCOVERY_ONLY:
            return self.prompt_length
        return next((span.target_start for span in self.spans if not span.exact), self.prompt_length)

    @property
    def holes(self) -> tuple[range, ...]:
        """Ranges below `prefix_end` that no span covers: the wrapper computes them."""
        if self.kind is PlanKind.DISCOVERY_ONLY:
            return ()
        holes, position = [], self.num_computed_tokens
        for span in self.spans:
            if span.target_start > position:
                holes.append(range(position, span.target_start))
            position = span.target_end
        if position < self.prefix_end:
            holes.append(range(position, self.prefix_end))
        return tuple(holes)

    def with_target_blocks(self, block_ids: tuple[int, ...]) -> SemanticKvPlan:
        return replace(self, target_block_ids=block_ids)

    def without_spans(self, reason: str) -> SemanticKvPlan:
        """The same promise kept by computing everything: what remains when a donor cannot be read any more.

        Raises PlanError `hole_needs_wrapper` when a stock engine was promised tokens: it cannot compute them.
        """
        return replace(self, spans=(), diagnostics={**self.diagnostics, "dropped": reason})


def _check_counts(plan: SemanticKvPlan) -> None:
    if plan.num_computed_tokens < 0 or plan.matched_tokens < 0 or plan.block_size < 1:
        raise PlanError(
            "negative_count",
            f"request {plan.request_id}: num_computed_tokens {plan.num_computed_tokens} and matched_tokens "
            f"{plan.matched_tokens} must be >= 0 and block_size {plan.block_size} >= 1",
        )
    if plan.kind is PlanKind.DISCOVERY_ONLY:
        return
    if plan.prefix_end > plan.prompt_length - 1:
        raise PlanError(
            "no_token_left",
            f"request {plan.request_id}: prefix {plan.prefix_end} leaves no token of a prompt of {plan.prompt_length} "
            "to compute; at least one must stay",
        )


def _check_spans(plan: SemanticKvPlan) -> None:
    position = 0
    for span in plan.spans:
        if span.target_start < position:
            raise PlanError(
                "spans_overlap",
                f"request {plan.request_id}: span at {span.target_start} starts before {position}, where the span "
                "before it ends; spans must be sorted and disjoint",
            )
        if span.target_end > plan.prompt_length:
            raise PlanError(
                "span_outside_prompt",
                f"request {plan.request_id}: span ends at {span.target_end}, beyond the prompt of {plan.prompt_length}",
            )
        if span.target_start < plan.num_computed_tokens:
            raise PlanError(
                "span_below_computed",
                f"request {plan.request_id}: span at {span.target_start} would overwrite the exact prefix of "
                f"{plan.num_computed_tokens} tokens",
            )
        if plan.kind is not PlanKind.DISCOVERY_ONLY and span.target_end > plan.prefix_end:
            raise PlanError(
                "span_beyond_prefix",
                f"request {plan.request_id}: span ends at {span.target_end}, beyond the promised prefix of "
                f"{plan.prefix_end}; KV that is placed must be used",
            )
        position = span.target_end


def _check_kind(plan: SemanticKvPlan) -> None:
    if plan.kind is PlanKind.EXACT_PREFIX and not all(span.exact for span in plan.spans):
        raise PlanError(
            "exact_prefix_with_approximate_span",
            f"request {plan.request_id}: an exact_prefix plan may only hold exact spans",
        )
    if plan.kind is PlanKind.DISCOVERY_ONLY and plan.matched_tokens:
        raise PlanError(
            "discovery_promises_tokens",
            f"request {plan.request_id}: a discovery_only plan promises {plan.matched_tokens} tokens but moves none",
        )
    if plan.execution.mode is EngineMode.STOCK and plan.matched_tokens and plan.holes:
        raise PlanError(
            "hole_needs_wrapper",
            f"request {plan.request_id}: positions {plan.holes[0].start}..{plan.holes[0].stop - 1} have no donor and "
            "a stock engine would skip them",
        )


def _check_blocks(plan: SemanticKvPlan) -> None:
    if plan.target_block_ids is None:
        return
    needed = -(-plan.prefix_end // plan.block_size)
    if len(plan.target_block_ids) < needed:
        raise PlanError(
            "blocks_too_few",
            f"request {plan.request_id}: {len(plan.target_block_ids)} blocks of {plan.block_size} tokens do not hold "
            f"a prefix of {plan.prefix_end}; {needed} are needed",
        )
    if min(plan.target_block_ids, default=0) < 0:
        raise PlanError(
            "block_negative", f"request {plan.request_id}: block id {min(plan.target_block_ids)} is negative"
        )
    if len(set(plan.target_block_ids)) < len(plan.target_block_ids):
        raise PlanError(
            "block_repeated", f"request {plan.request_id}: a block occurs twice and would hold two ranges of the prompt"
        )


@dataclass(frozen=True, slots=True)
class CheckEvidence:
    """Tokens of one plan by what became of them; `offered_tokens`, those of all spans, are either reused or recomputed.

    `checked_tokens` were compared with their donor's KV. `reused_tokens` keep the donor's KV above the check layer;
    exact spans, which need no check, are among them. `largest_kept` is the largest deviation of a checked token that is
    reused, 0.0 without one. `is_dropped` says that the plan would have saved too little and everything was computed.
    """

    request_id: int
    offered_tokens: int
    checked_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    largest_kept: float
    is_dropped: bool
