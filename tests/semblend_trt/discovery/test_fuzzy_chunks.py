"""Fuzzy chunks: which runs are joined, what a difference costs, and that no piece holds a token that differs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.discovery.fuzzy_chunks import MAX_GAP, MAX_OVERLAP, chunks_of, fill
from semblend_trt.discovery.planner import Planned
from semblend_trt.discovery.span_index import Run
from semblend_trt.plan import EngineMode, SemanticKvPlan
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.semblend_trt.discovery.planning import STOCK, WRAPPER, plan_of, planner, profile, request
from tests.semblend_trt.samples import text

HEAD, DOCUMENT, TAIL = text(1, 70), text(2, 480), text(3, 20)


def changed(tokens: np.ndarray, positions: range | list[int]) -> np.ndarray:
    """`tokens` with another id at each of `positions`."""
    edited = tokens.copy()
    edited[list(positions)] += 40_000
    return edited


def lookup(
    donors: dict[str, np.ndarray],
    prompt: np.ndarray,
    computed: int = 0,
    policy: str = "position_fix",
    mode: EngineMode = WRAPPER,
    made: ReuseProfile | None = None,
    **values: Any,
) -> Planned:
    return planner(donors, policy, **{"fuzzy_chunks": True, **values}).plan(
        request(prompt, computed, mode, profile=made)
    )


def covered(plan: SemanticKvPlan) -> set[int]:
    return {at for span in plan.spans for at in range(span.target_start, span.target_end)}


# -- what is a chunk ----------------------------------------------------------------------------------------------


def test_runs_with_small_differences_between_are_one_chunk() -> None:
    runs = [Run("a", 10, 100, 40), Run("a", 51, 141, 39), Run("a", 92, 181, 50)]
    ((chunk,), _) = chunks_of(runs, 0, 1000, margin=4)
    assert chunk.runs == tuple(runs)
    # Two tokens of the donor stand where the prompt has one, before the last run.
    assert chunk.pieces == (Run("a", 10, 100, 40), Run("a", 55, 145, 35), Run("a", 96, 185, 46))
    assert chunk.reusable_tokens == 121


@pytest.mark.parametrize(
    ("second", "joined"),
    [
        (Run("a", 50 + MAX_GAP, 140, 40), True),
        (Run("a", 51 + MAX_GAP, 140, 40), False),
        (Run("a", 50, 140 + MAX_GAP, 40), True),
        (Run("a", 50, 141 + MAX_GAP, 40), False),
        (Run("a", 55, 140 - MAX_OVERLAP, 40), True),
        (Run("a", 55, 139 - MAX_OVERLAP, 40), False),
        (Run("b", 51, 141, 40), False),
        (Run("a", 5, 141, 40), False),
    ],
)
def test_what_follows_within_a_small_gap_in_donor_and_prompt_is_joined(second: Run, joined: bool) -> None:
    chunks, alone = chunks_of([Run("a", 10, 100, 40), second], 0, 1000, margin=4)
    assert (len(chunks), len(alone)) == ((1, 0) if joined else (0, 2))


def test_a_run_joins_the_chunk_of_the_nearest_shift() -> None:
    first, other, second = Run("a", 0, 100, 40), Run("a", 7, 101, 40), Run("a", 42, 142, 40)
    ((chunk,), alone) = chunks_of([first, other, second], 0, 1000, margin=4)
    assert alone == [other]
    assert chunk.runs == (first, second)


def test_pieces_end_where_positions_may_not_be_reused() -> None:
    ((chunk,), _) = chunks_of([Run("a", 0, 100, 40), Run("a", 41, 141, 40)], 120, 170, margin=4)
    assert chunk.pieces == (Run("a", 20, 120, 20), Run("a", 45, 145, 25))
    # The margin behind a difference that the engine's own prefix holds is computed all the same.
    ((chunk,), _) = chunks_of([Run("a", 0, 100, 40), Run("a", 41, 141, 40)], 142, 170, margin=4)
    assert chunk.pieces == (Run("a", 45, 145, 25),)


def test_what_is_placed_already_stays_and_free_places_are_filled() -> None:
    chunks, _ = chunks_of([Run("a", 0, 100, 40), Run("a", 41, 141, 40)], 0, 1000, margin=4)
    chosen = [Run("b", 7, 110, 20)]
    placed, used = fill(chosen, chunks, 0, 1000, min_span=36, shortest=1)
    assert placed == [Run("b", 7, 110, 20), Run("a", 45, 145, 36)]  # what lies beside `b` is too short to be worth it
    assert used == [chunks[0].explained(36)]
    assert fill(chosen, chunks, 0, 1000, min_span=37, shortest=1) == (chosen, [])
    assert fill(chosen, chunks, 0, 1000, min_span=30, shortest=37) == (chosen, [])


def test_pieces_already_chosen_count_for_their_chunk() -> None:
    chunks, _ = chunks_of([Run("a", 0, 100, 60), Run("a", 61, 161, 40)], 0, 1000, margin=4)
    chosen = [Run("a", 0, 100, 60)]
    placed, used = fill(chosen, chunks, 160, 1000, min_span=90, shortest=1)
    assert placed == [*chosen, Run("a", 65, 165, 36)]
    assert used == [
        {
            "donor_id": "a",
            "target": [100, 201],
            "runs": 2,
            "tokens": 101,
            "tokens_reused": 96,
        }
    ]


# -- what the planner makes of them -------------------------------------------------------------------------------


def test_a_number_changed_every_forty_tokens() -> None:
    edits = range(39, len(DOCUMENT), 40)
    prompt = np.concatenate([HEAD, changed(DOCUMENT, edits), TAIL])
    donors = {"a": np.concatenate([text(9, 11), DOCUMENT])}
    assert lookup(donors, prompt, fuzzy_chunks=False).outcome_reason == "no_donor_match"
    plan = plan_of(lookup(donors, prompt))
    assert [span.target_start - len(HEAD) for span in plan.spans] == [0, *range(44, len(DOCUMENT), 40)]
    assert plan.reused_tokens == 39 + 11 * 35
    (chunk,) = plan.diagnostics["fuzzy_chunks"]
    assert chunk == {
        "donor_id": "a",
        "target": [70, 70 + 479],
        "runs": 12,
        "tokens": 479,
        "tokens_reused": plan.reused_tokens,
    }


def test_many_chunks_are_all_used() -> None:
    documents = [text(100 + at, 120) for at in range(80)]
    prompt = np.concatenate([part for each in documents for part in (changed(each, [59]), text(7, 60))])
    donors = {f"d{at}": each for at, each in enumerate(documents)}
    plan = plan_of(lookup(donors, prompt, fuzzy_margin_tokens=0))
    assert plan.reused_tokens == 80 * 119
    assert len(plan.diagnostics["fuzzy_chunks"]) == 80


def test_a_chunk_goes_on_however_many_others_have_begun_since() -> None:
    kept = [Run("a", 10_000 + 50 * at, 50 * at, 45) for at in range(40)]
    others = [Run("a", 400 * at, 50 * at + 3, 33) for at in range(1, 40)]
    chunks, alone = chunks_of(kept + others, 0, 10_000, margin=0)
    assert [chunk.runs for chunk in chunks] == [tuple(kept)]
    assert sorted(alone) == others


def test_only_an_engine_that_computes_holes_is_given_chunks() -> None:
    prompt = changed(DOCUMENT, [240])
    stock, wrapper = (plan_of(lookup({"a": DOCUMENT}, prompt, mode=mode)) for mode in (STOCK, WRAPPER))
    assert (stock.reused_tokens, wrapper.reused_tokens) == (240, 480 - 1 - 1 - 4)
    assert "fuzzy_chunks" not in stock.diagnostics


def test_a_whole_donor_is_preferred_to_one_that_differs() -> None:
    prompt = np.concatenate([HEAD, DOCUMENT, TAIL])
    donors = {"a": changed(DOCUMENT, [100, 140, 300]), "b": np.concatenate([text(8, 3), DOCUMENT])}
    plan = plan_of(lookup(donors, prompt))
    assert {span.donor_id for span in plan.spans} == {"b"}
    assert plan.reused_tokens == len(DOCUMENT)
    assert "fuzzy_chunks" not in plan.diagnostics


def test_under_policy_verified_pieces_are_checked_like_any_span() -> None:
    made = profile("verified", check=ProfileCheck(layer=2, threshold=0.2, max_span_share=0.5, min_saved_share=0.1))
    prompt = np.concatenate([HEAD, changed(DOCUMENT, range(39, 480, 40)), TAIL])
    plan = plan_of(lookup({"a": DOCUMENT}, prompt, policy="verified", made=made))
    assert len(plan.spans) == 12
    assert plan.is_checked
    assert plan.execution.check is not None
    assert not any(span.exact for span in plan.spans)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    margin=st.integers(0, 12),
    min_span=st.integers(33, 120),
    computed=st.integers(0, 200),
    policy=st.sampled_from(["position_fix", "epic", "cacheblend"]),
)
def test_no_span_holds_a_differing_token_and_margins_are_kept(
    seed: int, margin: int, min_span: int, computed: int, policy: str
) -> None:
    rng = np.random.default_rng(seed)
    donor = np.concatenate([text(5, int(rng.integers(1, 40))), DOCUMENT])
    offset = len(donor) - len(DOCUMENT)
    parts, behind, at, length = [HEAD], [], 0, len(HEAD)
    while at < len(DOCUMENT):
        size = int(rng.integers(5, 120))
        parts.append(DOCUMENT[at : at + size])
        at, length = at + size, length + len(parts[-1])
        if at >= len(DOCUMENT):
            break
        removed, added = int(rng.integers(0, 4)), int(rng.integers(0, 4))
        # Ids that no text holds, so that where a difference stands is no matter of opinion.
        parts.append(rng.integers(50_000, 60_000, added, dtype=np.int32))
        at, length = at + removed, length + added
        if removed or added:
            behind.append(length)
    prompt = np.concatenate([*parts, TAIL])
    planned = lookup(
        {"a": donor},
        prompt,
        computed=computed,
        policy=policy,
        fuzzy_margin_tokens=margin,
        min_span_tokens=min_span,
        min_reuse_ratio=0.0,
    )
    if planned.plan is None:
        assert planned.outcome_reason in {"no_donor_match", "prefix_covers_prompt"}
        return
    plan, reused = planned.plan, covered(planned.plan)
    for span in plan.spans:
        assert donor[span.donor_start : span.donor_end].tolist() == prompt[span.target_start : span.target_end].tolist()
        assert computed <= span.target_start
        assert span.target_end <= len(prompt) - 1
    for at in np.flatnonzero(prompt >= 50_000).tolist():
        assert at not in reused
    # A difference between two runs of the plan's own chunks costs its margin; before `offset` nothing is equal.
    assert offset > 0
    for chunk in plan.diagnostics.get("fuzzy_chunks", []):
        begin, end = chunk["target"]
        for place in behind:
            if begin < place < end:
                assert not reused & set(range(place, min(place + margin, end)))


def test_with_the_setting_off_the_margin_means_nothing() -> None:
    prompt = changed(DOCUMENT, [240])
    plans = [
        plan_of(lookup({"a": DOCUMENT}, prompt, fuzzy_chunks=False, fuzzy_margin_tokens=margin)) for margin in (4, 20)
    ]
    assert plans[0] == plans[1]
    assert plans[0].reused_tokens == 480 - 1 - 1
