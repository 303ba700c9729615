"""A promise that is kept is hardly ever called broken, however often one looks; drift is found, early and late."""

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from semblend_trt import drift
from semblend_trt.drift import ALPHA, CHECK_RESULTS, BoundedAnswer, DriftMonitor, RiskTest
from semblend_trt.outcome import Outcome, ReuseReport

TERMS = {"profile": "a" * 64, "max_kl": 0.01, "risk": 0.05}
RECEIPT = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, sampled_tokens=60, **TERMS).receipt
ANSWER = BoundedAnswer.model_validate(RECEIPT)


def after(risk, observations):
    test = RiskTest(risk)
    for is_over in observations:
        test.add(is_over=bool(is_over))
    return test


@given(st.sampled_from([0.001, 0.01, 0.05, 0.3, 0.9]), st.lists(st.booleans(), max_size=40))
def test_at_the_promised_risk_the_evidence_grows_on_no_check(risk, seen):
    """So it is a martingale, and Ville's inequality bounds how often it ever gets large."""
    before, over, within = (after(risk, [*seen, *more]).evidence for more in ([], [True], [False]))
    assert over > before > within > 0
    assert risk * over + (1 - risk) * within == pytest.approx(before)


def first_alarm(risk, observations):
    """The number of checks until the promise is called broken, None for never."""
    test = RiskTest(risk)
    for number, is_over in enumerate(observations, 1):
        test.add(is_over=bool(is_over))
        if test.evidence >= 1 / ALPHA:
            return number
    return None


@pytest.mark.parametrize("risk", [0.05, 0.2])
def test_a_kept_promise_is_called_broken_no_more_often_than_alpha(risk):
    rng, seeds = np.random.default_rng(0), 1000
    alarms = [first_alarm(risk, rng.random(300) < risk) for _ in range(seeds)]
    assert sum(alarm is not None for alarm in alarms) <= ALPHA * seeds


@pytest.mark.parametrize(("before", "most"), [(0, 300), (1000, 500)])
def test_three_times_the_risk_is_found_within_some_hundred_checks(before, most):
    rng, seeds = np.random.default_rng(1), 100
    alarms = []
    for _ in range(seeds):
        shifting = np.concatenate([rng.random(before) < 0.025, rng.random(most) < 0.15])
        alarms.append(first_alarm(0.05, shifting))
    assert sum(alarm is not None and alarm > before for alarm in alarms) >= 0.98 * seeds


@pytest.mark.parametrize(
    "change",
    [
        *({"max_kl": each} for each in (None, 0.0, float("nan"), float("inf"), "much")),
        *({"risk": each} for each in (None, 0.0, 1.0)),
        *({"sampled_tokens": each} for each in (None, 0)),
        {"profile": None},
    ],
)
def test_an_answer_without_a_sampled_bound_is_no_evidence(change):
    with pytest.raises(ValidationError):
        BoundedAnswer.model_validate(RECEIPT | change)


def test_a_broken_promise_is_one_tenants_and_one_profiles_and_is_counted_and_logged_once(caplog):
    counted = Counter()
    monitor = DriftMonitor(lambda result: counted.update([result]))
    other = ANSWER.model_copy(update={"profile": "b" * 64})
    for _ in range(40):
        monitor.observe("acme", ANSWER, is_over=True)
        monitor.observe("acme", other, is_over=False)
        monitor.observe("globex", ANSWER, is_over=False)
    assert [monitor.broken(salt) for salt in ("acme", "globex", None)] == [["a" * 64], [], []]
    assert counted == {"broken": 1, "over": 39, "within": 80}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_tests_are_bounded_and_what_finds_none_is_counted(monkeypatch):
    monkeypatch.setattr(drift, "MAX_TESTS", 2)
    counted = Counter()
    monitor = DriftMonitor(lambda result: counted.update([result]))
    for salt in range(5):
        monitor.observe(str(salt), ANSWER, is_over=True)
    assert counted == {"over": 2, "untested": 3}
    assert counted.keys() <= set(CHECK_RESULTS)


def test_threads_lose_no_check():
    counted = Counter()
    monitor = DriftMonitor(lambda result: counted.update([result]))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: monitor.observe(None, ANSWER, is_over=False), range(400)))
    [test] = monitor._tests.values()
    assert test.evidence == after(ANSWER.risk, [False] * 400).evidence
