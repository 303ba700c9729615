"""What spot checks say: how far an answer is from a cold run's at least, and whether a profile's promise is broken."""

import json
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from semblend_trt import cold_runs
from semblend_trt.cold_runs import (
    ALPHA,
    MAX_TOKENS,
    BoundedAnswer,
    DriftMonitor,
    RiskTest,
    least_kl,
    likelihood_fields,
    likelihoods_in,
)
from semblend_trt.outcome import Outcome, ReuseReport

GREEDY = {"prompt": "a", "temperature": 0, "max_tokens": 8}


def likeliest(probabilities, count):
    order = np.argsort(-probabilities)[:count]
    return {f"token_id:{token}": log(probabilities[token]) for token in order}


@pytest.mark.promise("commands", "Spot checks test a profile's promise:...")
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.floats(0.05, 4))
def test_what_is_proved_is_at_most_the_divergence_and_all_of_it_where_all_is_told(seed, count, spread):
    rng = np.random.default_rng(seed)
    cold, first = (np.exp(rng.normal(0, spread, 8)) for _ in range(2))
    cold, first = cold / cold.sum(), first / first.sum()
    true = float(np.sum(cold * np.log(cold / first)))
    proved = least_kl([("a", likeliest(first, count))], [("a", likeliest(cold, count))])
    assert 0 <= proved <= true + 1e-4
    if count == 8:
        assert proved == pytest.approx(true, abs=1e-4)


HALF, NINE = {"a": log(0.5), "b": log(0.5)}, {"a": log(0.9), "b": log(0.1)}
ONE = 0.5 * log(0.5 / 0.9) + 0.5 * log(0.5 / 0.1)


@pytest.mark.parametrize(
    ("first", "cold", "expected"),
    [
        ("aaa", "aaa", ONE),
        ("aba", "aaa", ONE * 2 / 3),  # what follows another token is compared with nothing
        ("b", "aaaa", ONE / 4),
        ("aaaa", "aa", ONE),
    ],
)
def test_tokens_are_compared_up_to_the_first_that_differs(first, cold, expected):
    found = least_kl([(token, NINE) for token in first], [(token, HALF) for token in cold])
    assert found == pytest.approx(expected, abs=1e-4)


def completion(**told):
    return json.dumps({"choices": [{"text": "ab", "logprobs": told}]}).encode()


def test_completions_and_chats_tell_the_same():
    rows = [{"token": each, "top_logprobs": [{"token": "a", "logprob": -0.5}]} for each in "ab"]
    chat = json.dumps({"choices": [{"logprobs": {"content": rows}}]}).encode()
    plain = completion(tokens=["a", "b"], top_logprobs=[{"a": -0.5}, {"a": -0.5}])
    assert likelihoods_in(chat) == likelihoods_in(plain) == [("a", {"a": -0.5}), ("b", {"a": -0.5})]


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"{}", b"[]", b'{"choices": []}', b'{"choices": [{"text": "a", "logprobs": null}]}', b"[" * 100_000),
        completion(tokens=[], top_logprobs=[]),
        completion(tokens=["a"], top_logprobs=[]),
        *(completion(tokens=["a"], top_logprobs=[each]) for each in (None, {"a": None}, {"a": "1"}, {"a": 800})),
        completion(tokens=["a"], top_logprobs=[{"a": float("nan")}]),
    ],
)
def test_what_tells_no_likelihoods_is_refused(answer):
    with pytest.raises(ValueError, match="tells no likelihoods"):
        likelihoods_in(answer)


@pytest.mark.parametrize(
    ("change", "is_judged"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_k": 1, "n": 1}, True),
        ({"temperature": 1.0, "seed": 0}, False),
        ({"n": 2}, False),
        ({"max_tokens": MAX_TOKENS + 1}, False),
        ({"max_tokens": None}, False),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 1}, False),
    ],
)
def test_only_short_greedy_answers_are_asked_for_likelihoods(change, is_judged):
    assert bool(likelihood_fields(GREEDY | change)) == is_judged


def test_chats_are_asked_in_their_own_way():
    fields = likelihood_fields({"messages": [], "temperature": 0, "max_completion_tokens": 8})
    assert fields == {"logprobs": True, "top_logprobs": 20, "return_tokens_as_token_ids": True}


TERMS = {"profile": "a" * 64, "max_kl": 0.01, "risk": 0.05}
RECEIPT = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, sampled_tokens=60, **TERMS).receipt
ANSWER = BoundedAnswer.model_validate(RECEIPT)


def after(risk, observations):
    test = RiskTest(risk)
    for is_over in observations:
        test.add(is_over=bool(is_over))
    return test


@pytest.mark.promise(
    "commands",
    "Spot checks test a profile's promise: a kept one is called broken with a probability of at most 0.01, three "
    "times the risk is found within some hundred answers",
)
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


@pytest.mark.promise("commands", "Spot checks test a profile's promise:...")
@pytest.mark.parametrize("risk", [0.05, 0.2])
def test_a_kept_promise_is_called_broken_no_more_often_than_alpha(risk):
    rng, seeds = np.random.default_rng(0), 1000
    alarms = [first_alarm(risk, rng.random(300) < risk) for _ in range(seeds)]
    assert sum(alarm is not None for alarm in alarms) <= ALPHA * seeds


@pytest.mark.promise("commands", "Spot checks test a profile's promise:...")
@pytest.mark.parametrize(("before", "most"), [(0, 300), (1000, 500)])
def test_three_times_the_risk_is_found_within_some_hundred_checks(before, most):
    rng, seeds = np.random.default_rng(1), 100
    alarms = []
    for _ in range(seeds):
        shifting = np.concatenate([rng.random(before) < 0.025, rng.random(most) < 0.15])
        alarms.append(first_alarm(0.05, shifting))
    assert sum(alarm is not None and alarm > before for alarm in alarms) >= 0.98 * seeds


WRONG = {
    "max_kl": (None, 0.0, float("nan"), float("inf"), "much"),
    "risk": (None, 0.0, 1.0),
    "sampled_tokens": (None, 0),
}


@pytest.mark.parametrize(("name", "value"), [(name, each) for name, values in WRONG.items() for each in values])
def test_an_answer_without_a_sampled_bound_is_no_evidence(name, value):
    with pytest.raises(ValidationError):
        BoundedAnswer.model_validate(RECEIPT | {name: value})


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
    monkeypatch.setattr(cold_runs, "MAX_TESTS", 2)
    counted = Counter()
    monitor = DriftMonitor(lambda result: counted.update([result]))
    for salt in range(5):
        monitor.observe(str(salt), ANSWER, is_over=True)
    assert counted == {"over": 2, "untested": 3}


def test_threads_lose_no_check():
    counted = Counter()
    monitor = DriftMonitor(lambda result: counted.update([result]))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: monitor.observe(None, ANSWER, is_over=False), range(400)))
    [test] = monitor._tests.values()
    assert test.evidence == after(ANSWER.risk, [False] * 400).evidence
