"""Random lives of an engine with our connector. KV carries a pattern that says whose it is, so that a stale byte shows.

STATEFUL_STEPS sets the number of steps, 5,000 by default; a nightly run takes 100,000.
"""

from __future__ import annotations

import os

import pytest

from validation.benchmarks.stateful import CASES, HABIT_CASES, Case, random_life
from validation.embedded_engine import evict_prefixes

STEPS = int(os.environ.get("STATEFUL_STEPS", "5000"))
ALL = (*CASES, *HABIT_CASES)


def habits_of(case):
    """What a life counts of its engine's own habits."""
    found = ["failed_forwards"] * (case.rough and case.version.survives_failed_forward)
    if case.refusal is not None:
        return [*found, f"refused_{case.refusal}"]
    found += ["saves_behind", "saves_together"] * case.rough
    return found + ["duplicates_freed", "blocks_handed_on"] * (case.rough and not case.holds_saved_blocks)


@pytest.mark.known_defect(3, 8)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_no_stale_byte_no_lease_and_no_block_is_lost(tmp_path, case):
    with random_life(case, tmp_path) as life:
        for _ in range(-(-STEPS // len(ALL))):
            life.step()
        life.quiet()
    assert (life.wrong_tokens, life.leaked_blocks) == (0, 0)
    happened = life.counts
    published = ["published_blocks_checked"] * case.block_reuse
    reused = ["hits", "donors_checked"] * (case.refusal is None)
    for name in ("admissions", "aborts", *published, *reused, *habits_of(case)):
        assert happened[name] > 0, f"{name}: otherwise nothing was tried"
    assert (happened["hits"] > 0) == (case.refusal is None)
    assert (happened["moved_hits"] > 0) == case.wrapper
    assert (happened["starts_again"] > 0) == case.v2


@pytest.mark.parametrize("wrapper", [False, True], ids=["stock", "wrapper"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_what_is_loaded_is_the_donors_own_under_either_manager_of_main(tmp_path, v2, wrapper):
    """Requests that run together begin alike, and others are given their blocks while the thread that saves waits."""
    with random_life(Case("main", v2=v2, overlap=False, wrapper=wrapper, rough=True), tmp_path) as life:
        for _ in range(12):
            life.gate.close()
            first = life._enqueue(begin := life._tokens(100))
            twin = life._enqueue(begin[:90] + life._tokens(10), first)
            life._llm.run_until(lambda ended=(first, twin): all(each.is_finished for each in ended))
            others = [life._enqueue(life._tokens(100)) for _ in range(3)]
            for _ in range(40):
                life._executor.step()
            life.let_saves_go_on()
            life._llm.run_until(lambda ended=others: all(each.is_finished for each in ended))
            life._llm.settle()
            evict_prefixes(life._llm)
            life._enqueue(twin.tokens(0, 95) + life._tokens(5), twin)
            life.quiet()
        assert life.wrong_tokens == 0
        assert life.counts["hits"] == 12
        assert (life.counts["blocks_handed_on"] > 0) != v2
