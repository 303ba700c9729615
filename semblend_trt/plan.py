"""SemanticKvPlan: which donor KV goes where for one request, how it is checked, and who computes the rest.

The constructor refuses every plan that could corrupt KV, so code that receives a plan need not check again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

WINDOW_TOKENS = 32  # a check's default


@dataclass(frozen=True, slots=True)
class BudgetLevel:
    """If a sample estimates a mean deviation of at most `deviation`, the `share` of the checked tokens is computed."""

    deviation: float
    share: float


@dataclass(frozen=True, slots=True)
class SpanCheck:
    """Layers below `layer` run on all tokens; `layer` compares every token's fresh K and V with its donor's.

    A token's deviation is the larger one of K's and V's, each ||fresh - donor|| / ||donor|| over heads and channels.
    Tokens above `threshold` are computed in all layers, or the `largest_share` of the checked tokens that deviates most
    (CacheBlend, arXiv 2405.16444). So are windows with a mean above `window_threshold`: where the text means something
    else, many tokens deviate by little. A window has `window_tokens` tokens from a span's first checked token on.

    If more than `max_span_share` of a span deviates, the whole span is computed. A plan that would save less than
    `min_saved_share` of its promised tokens is dropped: everything is computed.

    With `sample_every`, a sample comes first: every span's first window, and one random token of every `sample_every`
    after it. Below `layer` only the sample runs, over the donor's KV of the others. A window is suspect if its sample's
    mean is above `sample_threshold`, or one token above `threshold`. Suspect windows and their neighbours are checked
    as above; the others keep the donor's KV in all layers. If that would check more than `max_span_share` of the
    tokens, all are checked: the earlier text has changed their meaning, and a sample over donor KV sees too little.

    With `levels`, by rising deviation, the first one that the sample's mean does not exceed gives a budget; beyond the
    last all is computed. A share of 0 changes nothing. With a larger one all tokens are checked, and a share of them is
    computed too: those with the largest product of deviation and attention. The attention is what the prompt's last
    rows give to a token over the moved KV, in the upper half of the layers.

    Without `compares_all`, the sample alone says what a token deviates by: the mean of its window. What is suspect, and
    what a level asks for, is computed in all layers. No layer runs on the other tokens."""

    layer: int
    threshold: float | None = None
    largest_share: float | None = None
    max_span_share: float = 1.0
    min_saved_share: float = 0.0
    window_threshold: float | None = None
    window_tokens: int = WINDOW_TOKENS
    sample_every: int = 0
    sample_threshold: float = 0.0
    levels: tuple[BudgetLevel, ...] = ()
    compares_all: bool = True


@dataclass(frozen=True, slots=True)
class CheckEvidence:
    """Tokens of one plan by what became of them; `offered_tokens` are either reused or recomputed.

    `checked_tokens` were compared with their donor's KV, in whole windows; `sampled_tokens` of all windows came first.
    `reused_tokens` keep the donor's KV above the check layer, exact spans included. `largest_kept` is the largest
    deviation of a compared and reused token, else 0.0. `is_dropped`: everything was computed, as too little was
    saved, or too much at risk: `exceeds_levels`. `sampled_deviation`: the mean that a sample estimates, else 0."""

    request_id: int
    offered_tokens: int
    checked_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    largest_kept: float
    is_dropped: bool
    sampled_tokens: int = 0
    sampled_deviation: float = 0.0
    exceeds_levels: bool = False


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

    `exact`: the donor's text equals the prompt's from position 0 to the span's end; a cold run would produce the same
    KV. `generation`: how often the donor's KV was built from approximate KV."""

    donor_id: str
    donor_start: int
    target_start: int
    length: int
    exact: bool = False
    generation: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.donor_start < 0 or self.target_start < 0 or self.generation < 0:
            raise PlanError("span_range", f"{self}: starts and generation must be >= 0 and the length >= 1")
        if self.exact and self.generation:
            raise PlanError("exact_span_approximate", f"{self}: KV built from approximate KV is never exact")
        if self.exact and self.donor_start != self.target_start:
            raise PlanError("exact_span_shifted", f"{self}: KV that moves is never exact")

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

    Layers below `recompute_boundary_layer` compute every prompt token. From there on they compute only holes, the
    suffix and the first `head_tokens` tokens of every approximate span (EPIC, arXiv 2410.15332). With a `check`, layers
    below its own compute every token too, and it picks the spans' tokens for the others. No layer computes exact spans.
    `sample_seed` picks the check's sample, the same on every rank."""

    mode: EngineMode
    num_layers: int
    recompute_boundary_layer: int = 0
    check: SpanCheck | None = None
    head_tokens: int = 0
    sample_seed: int = 0

    def __post_init__(self) -> None:
        boundary, check, head, layers = self.recompute_boundary_layer, self.check, self.head_tokens, self.num_layers
        if layers < 1 or not 0 <= boundary <= layers:
            raise PlanError("boundary_outside_model", f"recompute boundary {boundary} is outside 0..{layers}")
        if check is not None and not 0 <= check.layer < layers:
            raise PlanError("check_outside_model", f"check layer {check.layer} is outside 0..{layers - 1}")
        if head < 0:
            raise PlanError("head_tokens_negative", f"head_tokens is {head}; it must be at least 0")
        if self.mode is EngineMode.STOCK and (reason := ReuseTerms(boundary, check, head).wrapper_reason) is not None:
            raise PlanError(reason, f"{self}: a stock engine can only skip whole tokens; attach the engine wrapper")


@dataclass(frozen=True, slots=True)
class ReuseTerms:
    """How runs that are not exact are executed: the fields of `EngineExecution` that a policy decides.

    Donors up to generation `generations` are used, and kept."""

    boundary: int = 0
    check: SpanCheck | None = None
    head_tokens: int = 0
    generations: int = 0

    @property
    def wrapper_reason(self) -> str | None:
        """Why a stock engine cannot keep these terms, or None."""
        if self.check is not None:
            return "check_needs_wrapper"
        if self.head_tokens:
            return "head_needs_wrapper"
        return "boundary_needs_wrapper" if self.boundary else None

    def expected_reuse(self, length: int) -> int:
        """Return how many of `length` tokens stay reused, as far as known before the check."""
        kept = max(0, length - self.head_tokens)
        if self.check is None or self.check.largest_share is None:
            return kept
        return kept - round(self.check.largest_share * kept)


@dataclass(frozen=True, slots=True)
class SemanticKvPlan:
    """One request's reuse, decided once on the scheduler and carried to every rank.

    `prompt_token_ids`: int32 [n], never changed. `num_computed_tokens` leading tokens are the engine's exact prefix and
    are never written; the executor was promised `matched_tokens` beyond them. It has no `target_block_ids` until the
    engine has allocated blocks."""

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
        for invariant, message in _broken_in(self):
            raise PlanError(invariant, f"request {self.request_id}: {message}")

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def prefix_end(self) -> int:
        """First position that the executor schedules."""
        return self.num_computed_tokens + self.matched_tokens

    @property
    def exact_tokens(self) -> int:
        """Count the tokens of exact spans, which no layer computes."""
        return sum(span.length for span in self.spans if span.exact)

    @property
    def reused_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def is_checked(self) -> bool:
        """True when a span has tokens to compare with its donor's, so that the engine leaves evidence."""
        execution = self.execution
        if execution.check is None or self.kind is PlanKind.DISCOVERY_ONLY:
            return False
        return any(not span.exact and span.length > execution.head_tokens for span in self.spans)

    @property
    def is_exact(self) -> bool:
        """True when every block may be published; a plan that moves nothing changes nothing."""
        return self.kind is not PlanKind.REQUEST_LOCAL

    @property
    def exact_token_count(self) -> int:
        """Count leading tokens whose KV equals a cold run's: those before the first placed span that is not exact."""
        return self.donor_part(0)[0]

    def donor_part(self, generations: int) -> tuple[int, int]:
        """Return the leading tokens with KV of generation `generations` at most, and their generation.

        That is 0 where a cold run would produce the KV, else one more than the largest among the spans moved there."""
        moved = () if self.is_exact else tuple(span for span in self.spans if not span.exact)
        end = next((span.target_start for span in moved if span.generation >= generations), self.prompt_length)
        return end, max((1 + span.generation for span in moved if span.target_start < end), default=0)

    @property
    def holes(self) -> tuple[range, ...]:
        """Ranges below `prefix_end` that no span covers: the wrapper computes them."""
        if self.kind is PlanKind.DISCOVERY_ONLY:
            return ()
        taken = ((span.target_start, span.target_end) for span in self.spans)
        return tuple(gaps(taken, self.num_computed_tokens, self.prefix_end))

    def with_target_blocks(self, block_ids: tuple[int, ...]) -> SemanticKvPlan:
        return replace(self, target_block_ids=block_ids)

    def without_spans(self, reason: str) -> SemanticKvPlan:
        """Return the plan without spans, as when a donor became unreadable: all promised tokens are computed.
        Raises PlanError `hole_needs_wrapper` when a stock engine was promised tokens: it cannot compute them."""
        return replace(self, spans=(), diagnostics={**self.diagnostics, "dropped": reason})


def gaps(taken: Iterable[tuple[int, int]], begin: int, end: int) -> Iterator[range]:
    """Yield the ranges of [begin, end) that `taken` (starts and ends, sorted and disjoint) leaves free."""
    for start, stop in (*taken, (end, end)):
        if begin < min(start, end):
            yield range(begin, min(start, end))
        begin = max(begin, stop)


def _broken_in(plan: SemanticKvPlan) -> Iterator[tuple[str, str]]:
    """Yield the invariants that a plan breaks, with a message: of counts, spans, kind and blocks."""
    computed, matched = plan.num_computed_tokens, plan.matched_tokens
    if min(computed, matched) < 0 or plan.block_size < 1:
        yield "negative_count", f"{computed} computed and {matched} matched tokens, blocks of {plan.block_size}"
    if plan.kind is not PlanKind.DISCOVERY_ONLY and plan.prefix_end > plan.prompt_length - 1:
        message = f"a prefix of {plan.prefix_end} leaves no token of a prompt of {plan.prompt_length} to compute"
        yield "no_token_left", message
    position = 0
    for span in plan.spans:
        if span.target_start < position:
            yield "spans_overlap", f"{span} starts before {position}; spans must be sorted and disjoint"
        if span.target_end > plan.prompt_length:
            yield "span_outside_prompt", f"{span} ends beyond the prompt of {plan.prompt_length}"
        if span.target_start < plan.num_computed_tokens:
            yield "span_below_computed", f"{span} would overwrite the exact prefix of {plan.num_computed_tokens} tokens"
        if plan.kind is not PlanKind.DISCOVERY_ONLY and span.target_end > plan.prefix_end:
            yield "span_beyond_prefix", f"{span} ends beyond the promised prefix of {plan.prefix_end}"
        position = span.target_end
    if plan.kind is PlanKind.EXACT_PREFIX and not all(span.exact for span in plan.spans):
        yield "exact_prefix_with_approximate_span", "an exact_prefix plan may only hold exact spans"
    if plan.kind is PlanKind.REQUEST_LOCAL and plan.execution.check is None:
        unchecked = [span for span in plan.spans if span.generation]
        if unchecked:
            yield "generation_unchecked", f"{unchecked[0]} is placed unchecked; its donor's KV is approximate"
    if plan.kind is PlanKind.DISCOVERY_ONLY and plan.matched_tokens:
        yield "discovery_promises_tokens", f"{plan.matched_tokens} tokens are promised by a plan that moves none"
    if plan.execution.mode is EngineMode.STOCK and plan.matched_tokens and plan.holes:
        yield "hole_needs_wrapper", f"positions {plan.holes[0]} have no donor, and a stock engine would skip them"
    blocks, needed = plan.target_block_ids, -(-plan.prefix_end // plan.block_size)
    if blocks is None:
        return
    if len(blocks) < needed:
        yield "blocks_too_few", f"{len(blocks)} blocks do not hold a prefix of {plan.prefix_end}; {needed} are needed"
    if min(blocks, default=0) < 0:
        yield "block_negative", f"block id {min(blocks)} is negative"
    if len(set(blocks)) < len(blocks):
        yield "block_repeated", "a block occurs twice and would hold two ranges of the prompt"
