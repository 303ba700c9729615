"""From a prompt to a plan or a named refusal: the only place that decides which runs are reused.

The planner leases and moves nothing. The scheduler leases the donors of a plan's spans; where it cannot, it asks for a
plan without those donors."""

from __future__ import annotations

import gc
import heapq
import secrets
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from semblend_trt.config import Settings, terms_of
from semblend_trt.discovery.span_index import Run
from semblend_trt.plan import EngineExecution, EngineMode, PlanKind, PlanSpan, ReuseTerms, SemanticKvPlan, gaps
from semblend_trt.policy import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.cost import CostModel
    from semblend_trt.discovery.span_index import Scan, SpanIndex
    from semblend_trt.reuse_profile import ReuseProfile


# From here on the default, 5 ms, is under 1 % of vLLM 0.25.1's prefill on an H100 (validation/assets/h100_ttft.json).
# Shorter prompts have it too: on a busy machine a lookup takes milliseconds, and a cut one costs a prefill.
DEADLINE_TOKENS = 20_480
# The share of a lookup's time for finding runs; the rest is for choosing.
_FINDING_SHARE = 0.6
# Refusals that a hidden run could have averted.
_AVERTABLE = frozenset({"no_donor_match", "low_reuse"})


class Deadline:
    """Ends after `milliseconds` of this thread's processor time, or in proportion for more than DEADLINE_TOKENS; never
    before `least` seconds.

    Time spent waiting for a processor or Python's lock does not count: giving up would not bring it back. Work asks
    before each piece; `has_cut` says that one was refused."""

    def __init__(
        self, milliseconds: float, tokens: int, least: float = 0.0, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Begin now; `clock` returns seconds."""
        self._clock = clock
        self._begin = clock()
        self._seconds = max(least, milliseconds / 1000 * max(tokens, DEADLINE_TOKENS) / DEADLINE_TOKENS)
        self.has_cut = False

    def is_over(self, share: float = 1.0) -> bool:
        """Return whether this share of the time has gone by."""
        is_over = self._clock() > self._begin + share * self._seconds
        self.has_cut |= is_over
        return is_over


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One prompt to plan: `tokens` int32 [prompt]; the engine's exact prefix is `num_computed_tokens` of them.

    `publication_guard`: approximate KV stays out of the engine's reuse tree. `profile` holds for the request's
    namespace; without one `profile_refusal` says why. `exact_only`: nothing is placed that differs from a cold run.
    `costs`: what plans take in this engine; None if nothing was measured. `tokens_left`: see `Runtime`."""

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
    exact_only: bool = False
    costs: CostModel | None = None
    tokens_left: int = 1

    @property
    def last_usable(self) -> int:
        """End of the positions that may be reused: the engine always computes the last prompt token."""
        return len(self.tokens) - self.tokens_left


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, or the reason for its absence; `runs_found` counts runs before any rule applied.

    A plan with a reason may lack runs: `lookup_timeout` or `lookup_bound`; or has exact ones alone: `does_not_pay`."""

    plan: SemanticKvPlan | None
    outcome_reason: str | None
    runs_found: int
    scan: Scan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Preference:
    """Choose between runs or parts of them: the most `weight` first, then an order among equals.

    That order: a low generation (`generations` holds those above 0), near donors (KV on the GPU), donors in use
    already, shifts by whole blocks, the donor that offers most tokens, the lowest donor id."""

    is_near: Callable[[str], bool] = lambda _donor_id: False
    block_size: int = 1
    generations: Mapping[str, int] = field(default_factory=dict)

    def weight(self, piece: Run) -> int:
        """Return the piece's length; for a donor of generation g, that divided by g + 1."""
        return piece.length // (1 + self.generations.get(piece.donor_id, 0)) if self.generations else piece.length


class _Refusal(Exception):  # noqa: N818 - an answer, not an error
    """Ends planning; its text is the reason under which it is counted."""


class Planner:
    """Plan one prompt at a time under one policy. Thread safe: it has no state between calls.

    Of equally good donors one with KV on the GPU (`is_near`) is taken. `generations` holds donors' generations above 0
    and may change between calls. Such a donor is never exact; the request's profile bounds the generation that is used.
    Raises ConfigurationError when the policy needs a layer beyond `num_layers`.

    A model with chunked attention has chunks of `chunk` tokens; None for others. Where a chunk ends, in donor or
    prompt, changes KV, so runs are cut there. `begins_alike` bounds how many first tokens are an exact donor's.

    Reasons for no plan are among those of requests in `semblend_trt.reasons`."""

    def __init__(
        self,
        index: SpanIndex,
        settings: Settings,
        policy: ReusePolicy,
        num_layers: int,
        is_near: Callable[[str], bool] = lambda _donor_id: False,
        generations: Mapping[str, int] | None = None,
        chunk: int | None = None,
        begins_alike: Callable[[str, npt.NDArray[np.int32]], int] = lambda _namespace_key, tokens: len(tokens),
    ) -> None:
        self._index, self._settings, self._policy, self._num_layers = index, settings, policy, num_layers
        self._is_near, self._chunk, self._begins_alike = is_near, chunk, begins_alike
        self._generations: Mapping[str, int] = {} if generations is None else generations
        self._terms = terms_of(policy, settings, num_layers)

    def plan(self, request: LookupRequest, deadline: Deadline | None = None, scan: Scan | None = None) -> Planned:
        """Look `request` up and plan its reuse; with the setting discovery_only the plan promises nothing.

        Past `deadline`, by default the settings' from now on, what was found and chosen by then is planned. `scan`
        replaces a new one of the same prompt."""
        deadline = deadline or Deadline(self._settings.lookup_deadline_ms, len(request.tokens))
        # A garbage collection over all of an engine's objects takes longer than a lookup may.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return self._plan(request, deadline, scan)
        finally:
            if was_enabled:
                gc.enable()

    def _plan(self, request: LookupRequest, deadline: Deadline, scan: Scan | None) -> Planned:
        runs: list[Run] = []
        try:
            self._check_worth_looking(request)
            terms, refusal = self._terms_for(request)
            if not self._may_pay(request, terms):
                raise _Refusal("does_not_pay")
            scan = scan or self._find(request, deadline)
            runs = [run for run in scan.runs if run.donor_id not in request.exclude]
            spans = self._select(request, self._in_chunks(runs), terms, refusal, deadline)
            if not self._is_worth_placing(request, spans, terms):
                raise _Refusal("low_reuse")
            plan, lacking = self._build(request, runs, spans, terms), None
            if not self._pays(request, plan):
                exact, lacking = [span for span in spans if span.exact], "does_not_pay"
                if not exact or not self._is_worth_placing(request, exact, None):
                    raise _Refusal(lacking)
                plan = self._build(request, runs, exact, None)
        except _Refusal as refusal:
            cut = _cut(request, scan, deadline)
            reason = str(refusal)
            return Planned(None, cut if cut and (deadline.has_cut or reason in _AVERTABLE) else reason, len(runs), scan)
        return Planned(plan, _cut(request, scan, deadline) or lacking, len(runs), scan)

    def _check_worth_looking(self, request: LookupRequest) -> None:
        min_span = self._settings.min_span_tokens
        if not self._settings.enabled:
            raise _Refusal("disabled")
        if self._policy is ReusePolicy.OFF:
            raise _Refusal("policy_off")
        if request.last_usable < min_span:
            raise _Refusal("short_prompt")
        if request.last_usable - request.num_computed_tokens < min_span:
            raise _Refusal("prefix_covers_prompt")

    def _may_pay(self, request: LookupRequest, terms: ReuseTerms | None) -> bool:
        """Return whether a search is worth its time: all tokens moved as one run would pay, or a donor begins alike."""
        begin, end = request.num_computed_tokens, request.last_usable
        if request.costs is None or terms is None:
            return True
        whole = PlanSpan("", begin, begin, end - begin)
        if self._pays(request, self._build(request, [], [whole], terms)):
            return True
        return self._begins_alike(request.namespace_key, request.tokens) >= begin + self._settings.min_span_tokens

    def _pays(self, request: LookupRequest, plan: SemanticKvPlan) -> bool:
        costs, share = request.costs, self._settings.min_saving
        return not costs or not share or plan.kind is not PlanKind.REQUEST_LOCAL or costs.saves(plan, share)

    def _find(self, request: LookupRequest, deadline: Deadline) -> Scan:
        is_over = partial(deadline.is_over, _FINDING_SHARE)
        try:
            scan = self._index.find(request.namespace_key, request.tokens, self._settings.min_span_tokens, is_over)
        except ValueError:
            # Engines mark multimodal input with ids outside the vocabulary: equal ids are not equal content.
            raise _Refusal("invalid_tokens") from None
        # Nothing is lost where other runs hold the same text.
        deadline.has_cut &= scan.hidden_end > request.num_computed_tokens
        return scan

    def _in_chunks(self, runs: list[Run]) -> list[Run]:
        """Cut runs at chunks. Raises _Refusal where runs are long enough and no piece of them is."""
        if self._chunk is None:
            return runs
        pieces = [piece for run in runs for piece in run.in_chunks(self._chunk)]
        longest, longest_piece = (max((run.length for run in each), default=0) for each in (runs, pieces))
        if longest >= self._settings.min_span_tokens > longest_piece:
            raise _Refusal("chunk_edge")
        return pieces

    def _terms_for(self, request: LookupRequest) -> tuple[ReuseTerms | None, str]:
        """Return how runs that are not exact are executed; None and a reason where none may be placed."""
        if request.exact_only:
            return None, "not_exact"
        terms = self._terms
        if self._policy is ReusePolicy.VERIFIED:
            if request.mode is EngineMode.STOCK:
                return None, "check_needs_wrapper"
            if request.profile is None:
                return None, request.profile_refusal
            terms = request.profile.terms_for(self._settings.max_kl, self._settings.risk)
            if terms is None and request.profile.terms is not None:
                return None, "no_bound"
        if terms is None:
            return None, "not_exact"
        if request.mode is EngineMode.STOCK and terms.wrapper_reason is not None:
            return None, terms.wrapper_reason
        return (terms, "") if request.publication_guard else (None, "no_publication_guard")

    def _select(
        self, request: LookupRequest, runs: list[Run], terms: ReuseTerms | None, refusal: str, deadline: Deadline
    ) -> list[PlanSpan]:
        """Return the spans to place, sorted and disjoint. Raises _Refusal with the rule that leaves none."""
        begin, end, min_span = request.num_computed_tokens, request.last_usable, self._settings.min_span_tokens
        generation = self._generations.get
        if self._generations:
            most = 0 if terms is None else terms.generations
            runs = [run for run in runs if generation(run.donor_id, 0) <= most]
        usable = [run for run in runs if min(run.target_end, end) - max(run.target_start, begin) >= min_span]
        if not usable:
            raise _Refusal("no_donor_match")
        preference = Preference(self._is_near, request.block_size, self._generations)
        # Exact KV precedes a longer shifted run: it costs no quality and may be published.
        first = _exact_run(usable, begin, end, preference)
        chosen, position = ([], begin) if first is None else ([first], first.target_end)
        strict = self._settings.strict_prefix_boundary
        # A run of head tokens alone would be moved, then computed anyway.
        worth_moving = max(min_span, 0 if terms is None else terms.head_tokens + 1)
        if terms is not None and (strict or request.mode is EngineMode.STOCK):
            chosen += chain(usable, position, end, worth_moving, preference)
            refusal = "strict_prefix_boundary" if strict else "hole_needs_wrapper"
        elif terms is not None:
            used_donors = {run.donor_id for run in chosen}
            chosen += cover(usable, position, end, worth_moving, used_donors, preference, deadline.is_over)
            refusal = "no_donor_match"
        if not chosen:
            raise _Refusal(refusal)
        spans = [PlanSpan(*run, exact=run is first, generation=generation(run.donor_id, 0)) for run in chosen]
        if strict and not (spans := _cut_to_block(spans, request.block_size, min_span)):
            raise _Refusal("strict_prefix_boundary")
        return spans

    def _is_worth_placing(self, request: LookupRequest, spans: list[PlanSpan], terms: ReuseTerms | None) -> bool:
        reused = sum(
            span.length if span.exact or terms is None else terms.expected_reuse(span.length) for span in spans
        )
        return reused >= self._settings.min_reuse_ratio * (len(request.tokens) - request.num_computed_tokens)

    def _build(
        self, request: LookupRequest, runs: list[Run], spans: list[PlanSpan], terms: ReuseTerms | None
    ) -> SemanticKvPlan:
        kind, spans, withheld = self._withhold(request, spans)
        # Exact spans need no token computed again or checked.
        terms = terms if kind is PlanKind.REQUEST_LOCAL and terms is not None else ReuseTerms()
        check = terms.check
        if check is not None and any(span.generation for span in spans):
            check = replace(check, sample_every=0)  # KV built from approximate KV is compared in full
        computed, end = request.num_computed_tokens, spans[-1].target_end
        taken = ((span.target_start, span.target_end) for span in spans)
        diagnostics: dict[str, Any] = {
            "runs_found": len(runs),
            "donors_considered": len({run.donor_id for run in runs}),
            "tokens_reused": sum(span.length for span in spans),
            "holes": [[hole.start, hole.stop] for hole in gaps(taken, computed, end)],
        }
        if withheld:
            diagnostics["withheld"] = [
                [each.donor_id, each.donor_start, each.target_start, each.length] for each in withheld
            ]
        return SemanticKvPlan(
            request_id=request.request_id,
            kind=kind,
            spans=tuple(spans),
            prompt_token_ids=request.tokens,
            num_computed_tokens=computed,
            matched_tokens=0 if kind is PlanKind.DISCOVERY_ONLY else end - computed,
            block_size=request.block_size,
            execution=EngineExecution(
                mode=request.mode,
                num_layers=self._num_layers,
                recompute_boundary_layer=terms.boundary,
                check=check,
                head_tokens=terms.head_tokens,
                sample_seed=secrets.randbits(32) if check is not None and check.sample_every else 0,
            ),
            diagnostics=diagnostics,
        )

    def _withhold(
        self, request: LookupRequest, spans: list[PlanSpan]
    ) -> tuple[PlanKind, list[PlanSpan], list[PlanSpan]]:
        """Return the kind of plan, its spans, and spans that settings allow only to be reported.

        The settings are discovery_only and exact_materialization_only."""
        settings, exact = self._settings, [span for span in spans if span.exact]
        if settings.discovery_only:
            return PlanKind.DISCOVERY_ONLY, spans, []
        if len(exact) == len(spans):
            return PlanKind.EXACT_PREFIX, spans, []
        if not settings.exact_materialization_only:
            return PlanKind.REQUEST_LOCAL, spans, []
        if settings.strict_prefix_boundary:
            exact = _cut_to_block(exact, request.block_size, settings.min_span_tokens)
        if not exact or not self._is_worth_placing(request, exact, None):
            return PlanKind.DISCOVERY_ONLY, spans, []
        return PlanKind.EXACT_PREFIX, exact, [span for span in spans if not span.exact]


def _cut(request: LookupRequest, scan: Scan | None, deadline: Deadline) -> str | None:
    """Return why reusable runs may be missing, or None."""
    if deadline.has_cut:
        return "lookup_timeout"
    is_hidden = scan is not None and scan.hidden_end > request.num_computed_tokens
    return "lookup_bound" if is_hidden else None


def _exact_run(runs: Sequence[Run], begin: int, end: int, preference: Preference) -> Run | None:
    """Return the longest run from position 0 of donor and prompt, cut to [begin, end), or None.

    Of equally long ones a near donor's is taken, and none of an approximate donor."""
    from_start = (run for run in runs if not run.donor_start and not run.target_start)
    exact = [run for run in from_start if run.donor_id not in preference.generations]
    near = preference.is_near
    best = min(exact, key=lambda run: (-min(run.target_end, end), not near(run.donor_id), run.donor_id), default=None)
    return None if best is None else best.within(begin, end)


def _cut_to_block(spans: list[PlanSpan], block_size: int, min_span: int) -> list[PlanSpan]:
    """Cut `spans` at the last block's end they reach; drop a last span left with less than `min_span`."""
    for last in range(len(spans) - 1, -1, -1):
        span = spans[last]
        length = span.target_end // block_size * block_size - span.target_start
        if length >= min_span:
            return [*spans[:last], replace(span, length=length)]
    return []


def cover(
    runs: Iterable[Run],
    begin: int,
    end: int,
    min_span: int,
    used_donors: Collection[str] = frozenset(),
    preference: Preference | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Run]:
    """Cover prompt positions [begin, end) with disjoint, sorted pieces of `runs`, each of at least `min_span` tokens.

    The piece of most weight is taken first; the free parts of pieces that it cuts are considered again. `preference`
    weighs pieces and decides between equal ones; `used_donors` are in use already. The order of `runs` does not matter.
    Once `is_over`, what was taken is the cover."""
    preference = preference or Preference()
    pieces = {piece for run in runs if (piece := run.within(begin, end)) is not None and piece.length >= min_span}
    offered = Counter[str]()
    for piece in pieces:
        offered[piece.donor_id] += piece.length
    ranks = {each: (preference.generations.get(each, 0), not preference.is_near(each)) for each in offered}
    waiting = [(-preference.weight(piece), piece) for piece in pieces]
    heapq.heapify(waiting)
    taken, chosen, ends = set(used_donors), list[Run](), list[int]()

    def tie(piece: Run) -> tuple[Any, ...]:
        # The donor id comes before positions, so that one donor's pieces are taken together.
        donor_id = piece.donor_id
        is_shifted = (piece.donor_start - piece.target_start) % preference.block_size != 0
        return (*ranks[donor_id], donor_id not in taken, is_shifted, -offered[donor_id], donor_id, *piece[2:0:-1])

    while waiting:
        weight, alike = waiting[0][0], list[Run]()
        while waiting and waiting[0][0] == weight:
            alike.append(heapq.heappop(waiting)[1])
        for piece in sorted(alike, key=tie):
            if is_over():
                return chosen
            at, free = _free_parts(piece, chosen, ends)
            if free == [piece]:
                chosen.insert(at, piece)
                ends.insert(at, piece.target_end)
                taken.add(piece.donor_id)
                continue
            for part in free:
                if part.length >= min_span:
                    heapq.heappush(waiting, (-preference.weight(part), part))
    return chosen


def _free_parts(piece: Run, chosen: list[Run], ends: list[int]) -> tuple[int, list[Run]]:
    """Return the place of `piece` among disjoint runs, sorted by prompt position, and its parts that none covers."""
    position, end, parts = piece.target_start, piece.target_end, list[Run]()
    first = at = bisect_right(ends, position)
    while at < len(chosen) and chosen[at].target_start < end:
        if (part := piece.within(position, chosen[at].target_start)) is not None:
            parts.append(part)
        position, at = ends[at], at + 1
    if (part := piece.within(position, end)) is not None:
        parts.append(part)
    return first, parts


def chain(runs: Sequence[Run], begin: int, end: int, min_span: int, preference: Preference | None = None) -> list[Run]:
    """Cover prompt positions from `begin` on without a hole, up to `end` or as far as the runs reach.

    Each piece starts where the last one ended and has at least `min_span` tokens. The run that reaches furthest is
    taken; of equally far ones the lowest generation, then a near donor, then the last piece's donor."""
    preference = preference or Preference()
    later = sorted(runs, key=lambda run: run.target_start, reverse=True)
    reaching: list[tuple[int, str, int]] = []
    chosen: list[Run] = []
    position, donor = begin, ""
    while True:
        while later and later[-1].target_start <= position:
            run = later.pop()
            heapq.heappush(reaching, (-min(run.target_end, end), run.donor_id, run.donor_start - run.target_start))
        furthest = -reaching[0][0] if reaching else position
        if furthest - position < max(min_span, 1):
            return chosen
        ties = []
        while reaching and -reaching[0][0] == furthest:
            _, donor_id, shift = heapq.heappop(reaching)
            generation = preference.generations.get(donor_id, 0)
            ties.append((generation, not preference.is_near(donor_id), donor_id != donor, donor_id, position + shift))
        *_, donor, donor_start = min(ties)
        chosen.append(Run(donor, donor_start, position, furthest - position))
        position = furthest
