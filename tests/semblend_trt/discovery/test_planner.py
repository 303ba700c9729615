"""Every rule of the planner, its refusals by name, and plans that hold for any prompt."""

import gc
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.cost import CostModel
from semblend_trt.discovery.planner import DEADLINE_TOKENS, Deadline, Preference, chain, cover
from semblend_trt.discovery.span_index import Run, ScanBounds
from semblend_trt.plan import BudgetLevel, PlanKind, PlanSpan, SpanCheck
from semblend_trt.reuse_profile import ProfileBound, ProfileCheck, ProfileLevel
from tests.semblend_trt.discovery import planning
from tests.semblend_trt.discovery.planning import NUM_LAYERS, STOCK, WRAPPER, plan_of, planner, profile
from tests.semblend_trt.samples import text

SYSTEM, DOCUMENT, OTHER, QUESTION = text(1, 100), text(2, 400), text(3, 300), text(4, 40)
PROMPT = np.concatenate([SYSTEM, DOCUMENT, OTHER, QUESTION])
SHIFTED = np.concatenate([text(5, 9), PROMPT])


def request(tokens=PROMPT, *rest, **named):
    return planning.request(tokens, *rest, **named)


def assert_refused(planned, reason):
    assert planned.plan is None
    assert planned.outcome_reason == reason


def test_a_shifted_document_becomes_a_request_local_plan_with_holes():
    donors = {"a": np.concatenate([text(5, 64), DOCUMENT]), "b": np.concatenate([text(6, 10), OTHER])}
    plan = plan_of(planner(donors).plan(request()))
    assert plan.spans == (PlanSpan("a", 64, 100, 400), PlanSpan("b", 10, 500, 300))
    assert plan.kind is PlanKind.REQUEST_LOCAL
    assert plan.matched_tokens == 800
    assert plan.holes == (range(100),)
    assert (plan.execution.mode, plan.execution.num_layers) == (WRAPPER, NUM_LAYERS)
    assert plan.execution.recompute_boundary_layer == 0
    assert (plan.request_id, plan.block_size) == (7, 32)
    assert plan.prompt_token_ids is PROMPT
    assert plan.diagnostics == {"runs_found": 2, "donors_considered": 2, "tokens_reused": 700, "holes": [[0, 100]]}


@pytest.mark.promise("reuse", "Of equally good donors of one generation, one on the card is taken")
@pytest.mark.parametrize("mode", [STOCK, WRAPPER])
def test_of_equally_good_donors_one_on_the_card_is_taken(mode):
    donors = {name: np.concatenate([text(ord(name[0]), 9), PROMPT]) for name in ("a", "near", "z")}
    donors |= {f"start-{name}": PROMPT[:200] for name in donors}
    asked = planner(donors, asks={"is_near": {"near", "start-near"}.__contains__})
    plan = plan_of(asked.plan(request(mode=mode)))
    assert plan.spans == (PlanSpan("start-near", 0, 0, 200, exact=True), PlanSpan("near", 209, 200, 639))


@pytest.mark.promise("reuse", "At least one prompt token is computed")
def test_one_prompt_token_always_stays():
    for donor in (PROMPT, np.concatenate([text(5, 3), PROMPT, text(6, 50)])):
        assert plan_of(planner({"a": donor}).plan(request())).prefix_end == len(PROMPT) - 1


def pieced(count, length=70, donors=8):
    """A prompt of `count` pieces of `length` tokens, and donors that hold them in other orders among other text."""
    pieces = [text(10 + at, length) for at in range(count)]
    order = np.random.default_rng(count).permutation(count)
    parts = [
        [part for at in order[each::donors] for part in (text(1, 3 + at % 5), pieces[at])] for each in range(donors)
    ]
    return {f"d{each}": np.concatenate(part) for each, part in enumerate(parts)}, np.concatenate([*pieces, QUESTION])


@pytest.mark.promise("donors", "A long prompt reuses all of...")
@pytest.mark.parametrize(("count", "length"), [(300, 70), (1300, 70), (1300, 200)])
def test_every_run_of_a_long_prompt_is_reused(count, length):
    donors, prompt = pieced(count, length)
    planned = planner(donors).plan(request(prompt))
    assert plan_of(planned).reused_tokens == count * length
    assert planned.runs_found == count


@pytest.mark.parametrize("every", [200, 500])
def test_edited_text_is_reused_around_its_differences(every):
    donor = text(3, 262_144)
    prompt = donor.copy()
    prompt[every - 1 :: every] += 1
    plan = plan_of(planner({"a": donor}).plan(request(prompt)))
    changed = len(range(every - 1, len(prompt) - 1, every))
    assert plan.reused_tokens == len(prompt) - 1 - changed


BOUND = ProfileBound(max_kl=0.01, risk=0.05, levels=[ProfileLevel(deviation=0.1, share=0.2)])
BOUNDED = profile("verified", check=ProfileCheck(layer=2, threshold=1.0, sample_every=8), bounds=[BOUND])
CHECK = ProfileCheck(layer=2, threshold=0.2, max_span_share=0.5, min_saved_share=0.1, window_threshold=0.06)
SPAN_CHECK = SpanCheck(2, 0.2, max_span_share=0.5, min_saved_share=0.1, window_threshold=0.06)


@pytest.mark.parametrize(
    ("policy", "made", "boundary", "check", "head"),
    [
        ("position_fix", None, 0, None, 0),
        ("boundary", None, 3, None, 0),
        ("epic", None, 0, None, 24),
        ("cacheblend", None, 0, SpanCheck(1, largest_share=0.3), 0),
        ("verified", profile("position_fix"), 0, None, 0),
        ("verified", profile("verified", check=CHECK), 0, SPAN_CHECK, 0),
        ("verified", profile("verified", check=CHECK, head_tokens=8), 0, SPAN_CHECK, 8),
    ],
)
def test_the_execution_that_policy_and_profile_give(policy, made, boundary, check, head):
    asked = planner(
        {"a": SHIFTED}, policy, recompute_boundary_layer=3, epic_tokens=24, cacheblend_share=0.3, min_reuse_ratio=0.1
    )
    execution = plan_of(asked.plan(request(profile=made))).execution
    assert (execution.recompute_boundary_layer, execution.check, execution.head_tokens) == (boundary, check, head)
    exact = planner({"a": PROMPT[:600]}, policy, recompute_boundary_layer=3)
    for mode in (STOCK, WRAPPER):  # exact spans need none of it
        execution = plan_of(exact.plan(request(mode=mode, profile=made))).execution
        assert (execution.recompute_boundary_layer, execution.check, execution.head_tokens) == (0, None, 0)


def test_the_levels_of_the_bound_for_the_settings_are_in_the_plan():
    execution = plan_of(planner({"a": SHIFTED}, "verified", max_kl=0.02).plan(request(profile=BOUNDED))).execution
    assert execution.check.levels == (BudgetLevel(0.1, 0.2),)


GENERATIONS = profile("verified", check=CHECK, generations=2)


@pytest.mark.promise("reuse", "A donor of a generation above...")
@pytest.mark.parametrize(
    ("policy", "generation", "used"),
    [("verified", 0, True), ("verified", 2, True), ("verified", 3, False)]
    + [(policy, 1, False) for policy in ("exact", "position_fix", "boundary", "epic", "cacheblend")],
)
def test_approximate_donors_are_used_by_verified_alone_up_to_the_generation_that_its_profile_allows(
    policy, generation, used
):
    for donor in (PROMPT[:600], SHIFTED):
        asked = planner({"a": donor}, policy, {"a": generation} if generation else {}, recompute_boundary_layer=2)
        planned = asked.plan(request(profile=GENERATIONS))
        assert planned.runs_found == 1
        if not used:
            assert_refused(planned, "no_donor_match")
            continue
        (span,) = plan_of(planned).spans
        assert (span.exact, span.generation) == (donor is not SHIFTED and not generation, generation)
        assert plan_of(planned).is_checked != span.exact


@pytest.mark.promise("engines", "Runs of a generation are checked whole")
def test_runs_of_a_generation_are_checked_without_a_sample():
    sampled = CHECK.model_copy(update={"sample_every": 8, "sample_threshold": 0.1})
    made = profile("verified", check=sampled, generations=2)
    plans = [
        plan_of(planner({"a": SHIFTED}, "verified", generations).plan(request(profile=made)))
        for generations in ({}, {}, {"a": 1})
    ]
    first, second, approximate = (plan.execution for plan in plans)
    dense = replace(SPAN_CHECK, sample_threshold=0.1)
    assert first.check == second.check == replace(dense, sample_every=8)
    assert first.sample_seed != second.sample_seed
    assert (approximate.check, approximate.sample_seed) == (dense, 0)


@pytest.mark.promise("policies", "The log says once what differs;...")
def test_reasons_of_missing_profiles_are_given_only_where_a_profile_could_have_helped():
    assert_refused(planner({}, "verified").plan(request()), "no_donor_match")
    assert_refused(planner({"a": PROMPT[:300]}, "verified").plan(request()), "low_reuse")


@pytest.mark.parametrize(
    ("policy", "computed", "reuse"),
    [("epic", 0, 300 - 60), ("cacheblend", 0, 300 - 75), ("position_fix", 0, 300), ("position_fix", 480, 300)],
)
def test_the_share_counts_tokens_that_stay_reused_of_those_that_the_engine_lacks(policy, computed, reuse):
    for ratio, reason in ((reuse / (840 - computed) - 0.001, None), (reuse / (840 - computed) + 0.001, "low_reuse")):
        asked = planner({"a": OTHER}, policy, epic_tokens=60, cacheblend_share=0.25, min_reuse_ratio=ratio)
        assert asked.plan(request(computed=computed)).outcome_reason == reason


def test_a_run_of_head_tokens_alone_is_not_moved():
    for head, reason in ((299, None), (300, "no_donor_match")):
        asked = planner({"a": OTHER}, "epic", epic_tokens=head, min_reuse_ratio=0.0)
        assert asked.plan(request()).outcome_reason == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"publication_guard": False, "mode": mode}, "no_publication_guard") for mode in (STOCK, WRAPPER)),
        ({"exact_only": True}, "not_exact"),
    ],
)
def test_without_a_publication_guard_or_if_so_asked_only_exact_kv_is_placed(changes, reason):
    asked = replace(request(), **changes)
    assert_refused(planner({"a": SHIFTED}).plan(asked), reason)
    plan = plan_of(planner({"a": SHIFTED, "b": PROMPT[:600]}).plan(asked))
    assert (plan.kind, plan.matched_tokens) == (PlanKind.EXACT_PREFIX, 600)


@pytest.mark.parametrize(
    ("length", "computed", "reason"),
    [
        *((length, 0, "short_prompt") for length in (0, 1, 64)),
        *((840, computed, "prefix_covers_prompt") for computed in (776, 840)),
        *((65, 0, None), (840, 775, None)),
    ],
)
def test_less_than_a_span_is_not_looked_up(length, computed, reason):
    assert planner({"a": PROMPT}, "exact").plan(request(PROMPT[:length], computed)).outcome_reason == reason


def test_discovery_only_reports_and_promises_nothing():
    donors = {"a": np.concatenate([text(5, 64), DOCUMENT, OTHER])}
    plan = plan_of(planner(donors, discovery_only=True).plan(request(computed=32)))
    assert plan.kind is PlanKind.DISCOVERY_ONLY
    assert plan.spans == (PlanSpan("a", 64, 100, 700),)
    assert plan.matched_tokens == 0
    assert plan.is_exact
    assert plan.diagnostics["tokens_reused"] == 700
    assert planner({}, discovery_only=True).plan(request()).outcome_reason == "no_donor_match"


def test_exact_materialization_only_places_what_is_exact_and_reports_the_rest():
    donors = {"exact": PROMPT[:300], "shifted": SHIFTED}
    plan = plan_of(planner(donors, exact_materialization_only=True, min_reuse_ratio=0.3).plan(request()))
    assert plan.kind is PlanKind.EXACT_PREFIX
    assert plan.spans == (PlanSpan("exact", 0, 0, 300, exact=True),)
    assert plan.diagnostics["withheld"] == [["shifted", 309, 300, 539]]
    assert plan.diagnostics["tokens_reused"] == 300
    freely = plan_of(planner(donors, min_reuse_ratio=0.3).plan(request()))
    assert freely.spans == (*plan.spans, PlanSpan("shifted", 309, 300, 539))
    assert (freely.kind, freely.exact_token_count, freely.holes) == (PlanKind.REQUEST_LOCAL, 300, ())


@pytest.mark.parametrize(("donors", "ratio"), [({"b": SHIFTED}, 0.3), ({"a": PROMPT[:300], "b": SHIFTED}, 0.4)])
def test_exact_materialization_only_without_enough_that_is_exact_only_reports(donors, ratio):
    plan = plan_of(planner(donors, exact_materialization_only=True, min_reuse_ratio=ratio).plan(request()))
    assert plan.kind is PlanKind.DISCOVERY_ONLY
    assert plan.matched_tokens == 0
    assert {span.donor_id for span in plan.spans} == set(donors)


@pytest.mark.parametrize("mode", [STOCK, WRAPPER])
@pytest.mark.parametrize("computed", [0, 32, 45])
def test_a_strict_prefix_has_no_hole_and_ends_with_a_block(mode, computed):
    donors = {"a": np.concatenate([text(5, 9), SYSTEM, DOCUMENT[:100]]), "b": DOCUMENT, "c": OTHER[20:]}
    asked = planner(donors, strict_prefix_boundary=True, min_reuse_ratio=0.1)
    plan = plan_of(asked.plan(request(mode=mode, computed=computed)))
    assert plan.spans == (PlanSpan("a", 9 + computed, computed, 200 - computed), PlanSpan("b", 100, 200, 480 - 200))
    assert plan.prefix_end % plan.block_size == 0
    assert plan.holes == ()


@pytest.mark.promise("donors", "A look-up over `SEMBLEND_LOOKUP_DEADLINE_MS` of processor...")
def test_a_lookup_past_its_deadline_is_refused_with_what_it_found():
    for milliseconds, runs_found in ((1, 0), (1700, 1)):
        planned = planner({"a": SHIFTED}).plan(
            request(), Deadline(milliseconds, DEADLINE_TOKENS, clock=count().__next__)
        )
        assert_refused(planned, "lookup_timeout")
        assert planned.runs_found == runs_found


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_pass_of_the_garbage_collector_is_part_of_a_lookup(is_enabled, monkeypatch):
    asked, passes = planner({"a": DOCUMENT}), []
    find = asked._index.find
    monkeypatch.setattr(asked._index, "find", lambda *given: passes.append(gc.isenabled()) or find(*given))
    (gc.enable if is_enabled else gc.disable)()
    try:
        asked.plan(request())
        assert (passes, gc.isenabled()) == ([False], is_enabled)
    finally:
        gc.enable()


@pytest.mark.promise("donors", "A look-up over `SEMBLEND_LOOKUP_DEADLINE_MS` of processor...")
def test_past_the_deadline_the_heaviest_that_was_chosen_is_planned():
    pieces = [text(20 + at, 70 + at) for at in range(40)]
    donors = {f"d{at:02}": piece for at, piece in enumerate(pieces)}
    prompt = np.concatenate([text(9, 9), *pieces[::-1], QUESTION])
    asked = planner(donors, min_reuse_ratio=0)
    # The clock is read five times until 40 runs are found, and once for each piece that is chosen.
    planned = asked.plan(request(prompt), Deadline(35_000, DEADLINE_TOKENS, clock=count().__next__))
    plan = planned.plan
    assert plan is not None
    assert (planned.outcome_reason, planned.runs_found) == ("lookup_timeout", 40)
    assert sorted(span.donor_id for span in plan.spans) == [f"d{at:02}" for at in range(10, 40)]
    # What is found in its part of the time is chosen from.
    planned = asked.plan(request(prompt), Deadline(4_000, DEADLINE_TOKENS, clock=count().__next__))
    assert planned.plan is not None
    assert (planned.outcome_reason, planned.runs_found) == ("lookup_timeout", 16)
    in_time = asked.plan(request(prompt), Deadline(45_000, DEADLINE_TOKENS, clock=count().__next__))
    assert plan_of(in_time).reused_tokens == sum(map(len, pieces))


@pytest.mark.promise("donors", "A long prompt reuses all of its runs, and a bound that may hide one is named")
def test_a_run_that_a_bound_may_hide_is_named():
    donors, prompt = {"a": DOCUMENT, "b": OTHER}, np.concatenate([SYSTEM, OTHER, DOCUMENT, QUESTION])

    def planned(ratio, computed=0):
        asked = planner(donors, bounds=ScanBounds(max_compared=100), min_reuse_ratio=ratio)
        return asked.plan(request(prompt, computed))

    plan = planned(0.4).plan
    assert [span.donor_id for span in plan.spans] == ["a"]
    assert planned(0.4).outcome_reason == "lookup_bound"
    assert_refused(planned(0.6), "lookup_bound")
    assert planner(donors, min_reuse_ratio=0.4).plan(request(prompt)).outcome_reason is None
    # What the engine holds itself is not hidden.
    assert planned(0.4, computed=400).outcome_reason is None
    assert_refused(planner({"a": DOCUMENT}, min_reuse_ratio=0.6).plan(request(prompt)), "low_reuse")


@pytest.mark.promise("donors", "A look-up over `SEMBLEND_LOOKUP_DEADLINE_MS` of processor...")
@pytest.mark.parametrize(
    ("tokens", "least", "milliseconds"),
    [(0, 0, 5), (8_192, 0.004, 5), (DEADLINE_TOKENS, 0, 5), (65_536, 0, 16), (262_144, 0.06, 64), (8_192, 0.01, 10)],
)
def test_a_deadline_grows_with_a_long_prompt(tokens, least, milliseconds):
    times = iter([10.0, 10.0, 10 + milliseconds / 1000 * 0.999, 10 + milliseconds / 1000 * 1.001])
    deadline = Deadline(5.0, tokens, least, clock=lambda: next(times))
    assert [deadline.is_over() for _ in range(3)] == [False, False, True]
    assert deadline.has_cut


@pytest.mark.promise("reuse", "Only equal tokens are reused: text...")
@pytest.mark.promise(
    "reuse",
    "A donor of a generation above 0 is never exact, always checked, and used by `verified` alone, up to the "
    "generation that the profile allows",
)
@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(["exact", "verified", "position_fix", "boundary", "epic", "cacheblend"]),
    made=st.sampled_from(
        [None, profile("position_fix"), *(profile("verified", check=CHECK, generations=g) for g in (0, 1, 3))]
    ),
    mode=st.sampled_from([STOCK, WRAPPER]),
    guard=st.booleans(),
    discovery_only=st.booleans(),
    strict=st.booleans(),
    exact_only=st.booleans(),
)
def test_every_plan_moves_equal_tokens_only(seed, policy, made, mode, guard, discovery_only, strict, exact_only):
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(0, 9, int(rng.integers(20, 150)), dtype=np.int32) for _ in range(5)]

    def shuffled():
        chosen = [pieces[i].copy() for i in rng.permutation(5)[: int(rng.integers(1, 6))]]
        for piece in chosen:
            piece[rng.integers(0, len(piece), int(rng.integers(0, 3)))] += 1
        return np.concatenate(chosen)[int(rng.integers(0, 15)) if rng.integers(0, 2) else 0 :]

    donors = {f"donor-{i}": shuffled() for i in range(3)}
    generations = {donor_id: int(rng.integers(1, 4)) for donor_id in donors if rng.integers(0, 2)}
    prompt = shuffled()
    asked = planner(
        donors,
        policy,
        generations,
        recompute_boundary_layer=3,
        min_span_tokens=int(rng.integers(1, 80)),
        min_reuse_ratio=float(rng.uniform(0, 0.4)),
        discovery_only=discovery_only,
        strict_prefix_boundary=strict,
        exact_materialization_only=exact_only,
    )
    computed = int(rng.integers(0, len(prompt)))
    planned = asked.plan(request(prompt, computed, mode, guard, made))
    assert (planned.plan is None) == (planned.outcome_reason is not None)
    if planned.plan is not None:
        check_plan(planned.plan, donors, prompt, computed)
        allowed = 0 if made is None or policy != "verified" or mode is STOCK else made.generations
        for span in planned.plan.spans:
            assert span.generation == generations.get(span.donor_id, 0) <= allowed
            assert not (span.exact and span.generation)
        if planned.plan.matched_tokens and any(span.generation for span in planned.plan.spans):
            assert planned.plan.is_checked
        assert planned.plan.is_exact or guard or discovery_only
        only_exact = policy == "exact" or (policy == "verified" and (made is None or mode is STOCK))
        assert planned.plan.kind is PlanKind.EXACT_PREFIX or not only_exact or discovery_only
        assert planned.plan.is_exact or not exact_only
        if strict:
            assert planned.plan.spans[-1].target_end % planned.plan.block_size == 0
            assert planned.plan.holes == ()


def check_plan(plan, donors, prompt, computed):
    for span in plan.spans:
        moved = donors[span.donor_id][span.donor_start : span.donor_end]
        assert moved.tolist() == prompt[span.target_start : span.target_end].tolist()
        assert computed <= span.target_start < span.target_end <= len(prompt) - 1
        if span.exact:
            assert donors[span.donor_id][: span.target_end].tolist() == prompt[: span.target_end].tolist()
    if plan.kind is PlanKind.DISCOVERY_ONLY:
        assert plan.matched_tokens == 0
        return
    assert plan.prefix_end == plan.spans[-1].target_end
    assert plan.reused_tokens + sum(map(len, plan.holes)) == plan.matched_tokens
    if plan.execution.mode is STOCK:
        assert plan.holes == ()


def priced(planned_row, **fields):
    """A request in an engine where a cold row costs 1, and one of a plan so much."""
    return replace(request(), costs=CostModel((0, 1, 0), (0, planned_row, 0, 0), 0), **fields)


@pytest.mark.promise(
    "reuse",
    "Where the engine has measured that moved KV would not save `SEMBLEND_MIN_SAVING` of a prompt's time, it is not "
    "used, and exact KV still is",
)
@pytest.mark.parametrize(
    ("planned_row", "settings", "reason"),
    [
        (1.7, {}, None),  # 440 of 840 tokens are computed
        (1.8, {}, "does_not_pay"),
        (1.8, {"min_saving": 0.05}, None),
        (9.0, {"min_saving": 0.0}, None),
        (9.0, {"discovery_only": True}, None),
    ],
)
def test_moved_runs_that_save_too_little_are_not_placed(planned_row, settings, reason):
    asked = planner(
        {"a": np.concatenate([text(5, 9), DOCUMENT])}, **{"min_saving": 0.1, "min_reuse_ratio": 0} | settings
    )
    planned = asked.plan(priced(planned_row))
    assert (planned.outcome_reason, planned.plan is None) == (reason, reason is not None)


@pytest.mark.promise("reuse", "Where the engine has measured that...")
def test_exact_runs_are_placed_where_moved_ones_do_not_pay():
    donors = {"a": PROMPT[:500], "b": np.concatenate([text(5, 9), OTHER])}
    planned = planner(donors, min_saving=0.1).plan(priced(9.0))
    assert planned.outcome_reason == "does_not_pay"
    assert planned.plan.spans == (PlanSpan("a", 0, 0, 500, exact=True),)
    assert planned.plan.kind is PlanKind.EXACT_PREFIX
    few = planner({"a": PROMPT[:200], "b": donors["b"]}, min_saving=0.1).plan(priced(9.0))
    assert_refused(few, "does_not_pay")


@pytest.mark.parametrize(
    ("planned_row", "begins", "searches"), [(0.9, 0, True), (1000.0, 31, False), (1000.0, 32, True)]
)
def test_what_cannot_pay_is_searched_only_if_a_donor_begins_alike(planned_row, begins, searches):
    asked = planner({"a": text(6, 99)}, asks={"begins_alike": lambda *_: begins}, min_saving=0.1, min_span_tokens=32)
    planned = asked.plan(priced(planned_row))
    assert (planned.outcome_reason, planned.scan is None) == (
        ("no_donor_match", False) if searches else ("does_not_pay", True)
    )


STRICT, TIGHT, SHORT = {"strict_prefix_boundary": True}, {"max_kl": 0.005}, {"lookup_deadline_ms": 0.001}
# The donor's tokens, policy and settings, and the request's fields.
_REFUSALS = {
    "disabled": (PROMPT, "position_fix", {"enabled": False}, {}),
    "policy_off": (PROMPT, "off", {}, {}),
    "invalid_tokens": (PROMPT, "position_fix", {}, {"tokens": -PROMPT}),
    "no_donor_match": (text(6, 99), "position_fix", {}, {}),
    "not_exact": (DOCUMENT, "exact", {}, {}),
    "boundary_needs_wrapper": (SHIFTED, "boundary", {"recompute_boundary_layer": 1}, {"mode": STOCK}),
    "head_needs_wrapper": (SHIFTED, "epic", {}, {"mode": STOCK}),
    "check_needs_wrapper": (SHIFTED, "verified", {}, {"mode": STOCK, "profile": profile("position_fix")}),
    "no_profile": (SHIFTED, "verified", {}, {}),
    "profile_mismatch": (SHIFTED, "verified", {}, {"profile_refusal": "profile_mismatch"}),
    "no_bound": (SHIFTED, "verified", TIGHT, {"profile": BOUNDED}),
    "profile_unreadable": (SHIFTED, "verified", {}, {"profile_refusal": "profile_unreadable"}),
    "no_publication_guard": (DOCUMENT, "position_fix", {}, {"guard": False}),
    "lookup_timeout": (PROMPT, "position_fix", SHORT, {}),
    "strict_prefix_boundary": (DOCUMENT, "position_fix", STRICT, {}),
    "hole_needs_wrapper": (DOCUMENT, "position_fix", {}, {"mode": STOCK}),
    "low_reuse": (OTHER, "position_fix", {}, {}),
}


@pytest.mark.parametrize("reason", sorted(_REFUSALS))
def test_each_refusal_happens(reason):
    donor, policy, settings, asked = _REFUSALS[reason]
    assert_refused(planner({"a": donor}, policy, **settings).plan(request(**asked)), reason)


RUNS = st.lists(
    st.builds(
        Run,
        donor_id=st.sampled_from(["a", "b", "c"]),
        donor_start=st.integers(0, 20),
        target_start=st.integers(0, 100),
        length=st.integers(1, 60),
    ),
    max_size=12,
)
BOUNDS = st.tuples(st.integers(0, 80), st.integers(0, 160), st.integers(1, 40))


def is_piece_of(piece, runs):
    return any(
        run.donor_id == piece.donor_id
        and run.target_start - run.donor_start == piece.target_start - piece.donor_start
        and run.target_start <= piece.target_start
        and piece.target_end <= run.target_end
        for run in runs
    )


@given(RUNS, BOUNDS)
def test_pieces_are_disjoint_and_of_the_runs_the_longest_among_them_and_nothing_long_is_left(runs, bounds):
    begin, end, min_span = bounds
    position, free = begin, set(range(begin, end))
    pieces = cover(runs, begin, end, min_span)
    for piece in pieces:
        assert piece.target_start >= position
        assert piece.length >= min_span
        assert is_piece_of(piece, runs)
        position = piece.target_end
        free -= set(range(piece.target_start, position))
    assert position <= max(begin, end)
    best = max((piece.length for run in runs if (piece := run.within(begin, end)) is not None), default=0)
    assert max((piece.length for piece in pieces), default=0) == (best if best >= min_span else 0)
    for run in runs:
        stretch = 0
        for at in range(run.target_start, run.target_end):
            stretch = stretch + 1 if at in free else 0
            assert stretch < min_span


def test_ties_go_to_a_near_donor_then_to_a_needed_one_then_to_whole_blocks_then_to_the_one_that_offers_most():
    runs = [Run(donor, start, 64, 100) for donor, start in [("a", 1), ("aligned", 96), ("near", 3), ("used", 5)]]

    def taken(runs, near="", used=(), block_size=32):
        return {piece.donor_id for piece in cover(runs, 0, 1000, 32, used, Preference({near}.__contains__, block_size))}

    assert taken(runs, "near", {"used"}) == {"near"}
    assert taken(runs, "", {"used"}) == {"used"}
    assert taken(runs) == {"aligned"}
    assert taken(runs, block_size=1) == {"a"}
    assert taken([Run("a", 0, 0, 100), Run("z", 0, 0, 100), Run("z", 100, 100, 90)], block_size=1) == {"z"}


@pytest.mark.promise("reuse", "An exact copy of the same...")
@pytest.mark.parametrize(("length", "taken"), [(100, "exact"), (199, "exact"), (200, "exact"), (202, "later")])
def test_a_run_of_a_later_generation_has_to_be_so_many_times_longer(length, taken):
    runs = [Run("exact", 7, 0, 100), Run("later", 0, 0, length)]
    pieces = cover(runs, 0, 1000, 32, {"later"}, Preference({"later"}.__contains__, 1, {"later": 1}))
    assert pieces[0].donor_id == taken
    assert sum(piece.length for piece in pieces) == (length if length - 100 >= 32 else 100)


@given(RUNS, BOUNDS)
def test_a_chain_has_no_hole(runs, bounds):
    begin, end, min_span = bounds
    position = begin
    for piece in chain(runs, begin, end, min_span):
        assert piece.target_start == position
        assert piece.length >= min_span
        assert is_piece_of(piece, runs)
        position = piece.target_end
    assert position <= max(begin, end)
    reach = [
        part.length for run in runs if run.target_start <= position and (part := run.within(position, end)) is not None
    ]
    assert max(reach, default=0) < min_span


def test_of_donors_that_reach_as_far_a_chain_takes_the_near_the_exact_and_its_own():
    runs = [Run("z", 0, 0, 100), Run("a", 0, 50, 150), Run("z", 500, 50, 150)]
    assert chain(runs, 0, 1000, 64) == [Run("z", 0, 0, 100), Run("z", 550, 100, 100)]
    assert chain(runs, 60, 1000, 64) == [Run("a", 10, 60, 140)]
    near_a, later_a = Preference({"a"}.__contains__), Preference({"a"}.__contains__, generations={"a": 1})
    assert chain(runs, 0, 1000, 64, near_a) == [Run("z", 0, 0, 100), Run("a", 50, 100, 100)]
    assert chain([Run("a", 0, 0, 100), Run("b", 0, 0, 100)], 0, 1000, 32, later_a) == [Run("b", 0, 0, 100)]


@pytest.mark.promise("engines", "No run is reused across the...")
@pytest.mark.parametrize(("shift", "reason"), [(64, "chunk_edge"), (256, None), (13, None)])
def test_a_run_without_a_piece_as_long_as_a_span_is_refused_by_name(shift, reason):
    """Where chunks of 128 tokens end 64 apart, no piece has 80 tokens."""
    moved = text(7, 700)
    made = planner({"a": np.concatenate([text(8, 7), moved])}, chunk=128, min_span_tokens=80)
    planned = made.plan(request(np.concatenate([text(9, 7 + shift), moved, text(10, 5)])))
    assert (planned.outcome_reason, planned.runs_found) == (reason, 1)


@pytest.mark.promise(
    "engines",
    "No run is reused across the end of a chunk, in donor or prompt, unless chunks end at the same tokens of both",
)
@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 900), st.integers(1, 300))
def test_pieces_are_the_run_and_each_lies_in_one_chunk(donor, target, length, chunk):
    run = Run("a", donor, target, length)
    pieces = run.in_chunks(chunk)
    assert sum(piece.length for piece in pieces) == length
    assert [piece.target_start for piece in pieces[1:]] == [piece.target_end for piece in pieces[:-1]]
    assert {piece.donor_start - piece.target_start for piece in pieces} == {donor - target}
    if (donor - target) % chunk == 0:
        assert pieces == [run]
        return
    for start, end in ((each[at], each[at] + each.length - 1) for each in pieces for at in (1, 2)):
        assert start // chunk == end // chunk
