"""From a prompt to a plan or a named refusal: the only place that decides which runs are reused.

The planner neither leases nor moves anything; the scheduler leases the donors of a plan's spans and asks again,
without them, when it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semblend_trt.discovery.cover import chain, cover
from semblend_trt.discovery.fingerprint import as_token_array
from semblend_trt.plan import (
    AttentionMode,
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    PublicationPolicy,
    SemanticKvPlan,
)
from semblend_trt.policy import ReusePolicy, ReuseTerms, allows_reuse, terms_of
from semblend_trt.token_ids import TokenIds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from semblend_trt.config import Settings
    from semblend_trt.discovery.span_index import Run, SpanIndex
    from semblend_trt.reuse_profile import ReuseProfile


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One prompt as the scheduler knows it: `tokens` int32 [prompt], of which `num_computed_tokens` are the engine's
    own exact prefix. `publication_guard` says that approximate KV is kept out of the engine's reuse tree. `profile` is
    one that holds for the request's namespace; where there is none, `profile_refusal` says why."""

    request_id: int
    namespace_key: str
    tokens: npt.NDArray[np.int32]
    num_computed_tokens: int
    block_size: int
    mode: EngineMode
    publication_guard: bool
    exclude: frozenset[str] = frozenset()
    profile: ReuseProfile | None = None
    profile_refusal: str = "no_profile"

    def excluding(self, donor_ids: frozenset[str]) -> LookupRequest:
        """The same request, planned without these donors as well."""
        return replace(self, exclude=self.exclude | donor_ids)

    @property
    def last_usable(self) -> int:
        """End of the positions that may be reused: one prompt token always stays to be computed."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, or the reason why there is none; `runs_found` counts the namespace's runs before any rule."""

    plan: SemanticKvPlan | None
    outcome_reason: str | None
    runs_found: int


class _Refusal(Exception):  # noqa: N818 - an answer, not an error
    """Ends planning; `reason` is the name under which it is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Planner:
    """Plans one prompt at a time under one policy. Thread safe: it keeps nothing between calls.

    Raises ConfigurationError when the policy needs a layer that a model of `num_layers` layers does not have.

    Reasons for no plan: disabled, policy_off, short_prompt, prefix_covers_prompt (the engine's own prefix leaves less
    than a span), invalid_tokens, no_donor_match, hole_needs_wrapper (no run goes on where the engine's prefix ends, and
    a stock engine computes no hole), low_reuse; and where only runs that are not exact were found: not_exact (policy
    exact, or a profile that justifies no more), no_profile, profile_mismatch, profile_unreadable, check_needs_wrapper,
    head_needs_wrapper, boundary_needs_wrapper (each on a stock engine), no_publication_guard (approximate KV could be
    published).
    """

    def __init__(self, index: SpanIndex, settings: Settings, policy: ReusePolicy, num_layers: int) -> None:
        self._index = index
        self._settings = settings
        self._policy = policy
        self._num_layers = num_layers
        self._terms = terms_of(policy, settings, num_layers)

    def plan(self, request: LookupRequest) -> Planned:
        """Looks `request` up and plans its reuse; with the setting discovery_only the plan promises nothing."""
        runs: list[Run] = []
        try:
            self._check_worth_looking(request)
            runs = self._find(request)
            terms, refusal = self._terms_for(request)
            spans = self._select(request, runs, terms, refusal)
            self._check_share(request, spans, terms)
        except _Refusal as refusal:
            return Planned(None, refusal.reason, len(runs))
        return Planned(self._build(request, runs, spans, terms), None, len(runs))

    def _check_worth_looking(self, request: LookupRequest) -> None:
        min_span = self._settings.min_span_tokens
        if not self._settings.enabled:
            raise _Refusal("disabled")
        if not allows_reuse(self._policy):
            raise _Refusal("policy_off")
        if request.last_usable < min_span:
            raise _Refusal("short_prompt")
        if request.last_usable - request.num_computed_tokens < min_span:
            raise _Refusal("prefix_covers_prompt")

    def _find(self, request: LookupRequest) -> list[Run]:
        try:
            tokens = as_token_array(request.tokens)
        except ValueError:
            # Engines mark multimodal placeholders with ids outside the vocabulary; equal ids are not equal content.
            raise _Refusal("invalid_tokens") from None
        runs = self._index.find(request.namespace_key, tokens)
        return [run for run in runs if run.donor_id not in request.exclude]

    def _terms_for(self, request: LookupRequest) -> tuple[ReuseTerms | None, str]:
        """How runs that are not exact are executed for this request; None, and the reason, where none may be placed."""
        terms = self._terms
        if self._policy is ReusePolicy.VERIFIED:
            if request.mode is EngineMode.STOCK:
                return None, "check_needs_wrapper"
            if request.profile is None:
                return None, request.profile_refusal
            terms = request.profile.terms
        if terms is None:
            return None, "not_exact"
        if request.mode is EngineMode.STOCK and terms.wrapper_reason is not None:
            return None, terms.wrapper_reason
        return (terms, "") if request.publication_guard else (None, "no_publication_guard")

    def _select(
        self, request: LookupRequest, runs: list[Run], terms: ReuseTerms | None, refusal: str
    ) -> list[PlanSpan]:
        """The spans to place, sorted and disjoint; raises _Refusal with the rule that leaves none."""
        begin, end, min_span = request.num_computed_tokens, request.last_usable, self._settings.min_span_tokens
        usable = [run for run in runs if (part := run.within(begin, end)) is not None and part.length >= min_span]
        if not usable:
            raise _Refusal("no_donor_match")
        spans = _exact_span(usable, begin, end)
        if terms is None:
            return _or_refuse(spans, refusal)
        # Exact KV comes first, even before a longer shifted run: it costs nothing in quality and may be published.
        position = spans[-1].target_end if spans else begin
        if request.mode is EngineMode.STOCK:
            rest, reason = chain(usable, position, end, min_span), "hole_needs_wrapper"
        else:
            used = {span.donor_id for span in spans}
            # A run of head tokens alone would be moved and then computed all the same.
            worth_moving = max(min_span, terms.head_tokens + 1)
            rest, reason = cover(usable, position, end, worth_moving, used), "no_donor_match"
        return _or_refuse(spans + [_span_of(run) for run in rest], reason)

    def _check_share(self, request: LookupRequest, spans: list[PlanSpan], terms: ReuseTerms | None) -> None:
        reused = sum(
            span.length if span.exact or terms is None else terms.expected_reuse(span.length) for span in spans
        )
        if reused < self._settings.min_reuse_ratio * (len(request.tokens) - request.num_computed_tokens):
            raise _Refusal("low_reuse")

    def _build(
        self, request: LookupRequest, runs: list[Run], spans: list[PlanSpan], terms: ReuseTerms | None
    ) -> SemanticKvPlan:
        computed = request.num_computed_tokens
        holes = _holes(spans, computed)
        kind = PlanKind.DISCOVERY_ONLY if self._settings.discovery_only else _kind_of(spans, holes)
        matched = 0 if kind is PlanKind.DISCOVERY_ONLY else spans[-1].target_end - computed
        request_local = kind in (PlanKind.REQUEST_LOCAL_PREFIX, PlanKind.REQUEST_LOCAL_SEGMENTED)
        # Exact spans alone need nothing computed again and nothing checked.
        terms = terms if request_local and terms is not None else ReuseTerms()
        return SemanticKvPlan(
            request_id=request.request_id,
            namespace_key=request.namespace_key,
            kind=kind,
            publication=PublicationPolicy.REQUEST_LOCAL if request_local else PublicationPolicy.EXACT_CACHE,
            spans=tuple(spans),
            prompt_token_ids=TokenIds(request.tokens),
            num_computed_tokens=computed,
            matched_tokens=matched,
            block_size=request.block_size,
            execution=EngineExecution(
                mode=request.mode,
                attention=_attention_of(kind, holes),
                num_layers=self._num_layers,
                suffix_start=computed + matched,
                recompute_boundary_layer=terms.boundary,
                check=terms.check,
                head_tokens=terms.head_tokens,
            ),
            diagnostics={
                "runs_found": len(runs),
                "donors_considered": len({run.donor_id for run in runs}),
                "tokens_reused": sum(span.length for span in spans),
                "holes": [[hole.start, hole.stop] for hole in holes],
            },
        )


def _exact_span(runs: list[Run], begin: int, end: int) -> list[PlanSpan]:
    """The longest run whose donor starts as the prompt starts, cut to [begin, end); empty when there is none."""
    from_start = [run for run in runs if run.donor_start == 0 and run.target_start == 0]
    best = min(from_start, key=lambda run: (-run.length, run.donor_id), default=None)
    part = None if best is None else best.within(begin, end)
    return [] if part is None else [_span_of(part, exact=True)]


def _span_of(run: Run, *, exact: bool = False) -> PlanSpan:
    return PlanSpan(run.donor_id, run.donor_start, run.target_start, run.length, exact)


def _or_refuse(spans: list[PlanSpan], reason: str) -> list[PlanSpan]:
    if not spans:
        raise _Refusal(reason)
    return spans


def _holes(spans: list[PlanSpan], position: int) -> list[range]:
    """Ranges between `position` and the end of the last span that no span covers."""
    holes = []
    for span in spans:
        if span.target_start > position:
            holes.append(range(position, span.target_start))
        position = span.target_end
    return holes


def _kind_of(spans: list[PlanSpan], holes: list[range]) -> PlanKind:
    if all(span.exact for span in spans):
        return PlanKind.EXACT_PREFIX
    return PlanKind.REQUEST_LOCAL_SEGMENTED if holes else PlanKind.REQUEST_LOCAL_PREFIX


def _attention_of(kind: PlanKind, holes: list[range]) -> AttentionMode:
    if kind is PlanKind.DISCOVERY_ONLY:
        return AttentionMode.FULL_PREFILL
    return AttentionMode.HOLES_AND_SUFFIX if holes else AttentionMode.SUFFIX_ONLY
