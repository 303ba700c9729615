"""Answers and cold runs are compared token by token, and runs of a sample wait for their turn, not serving for them."""

import asyncio
import hashlib
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.cold_runs import MAX_WAITING, VERIFY_HEADER, ColdRuns, cold_body, compared, said_in
from semblend_trt.drift import CHECK_RESULTS
from semblend_trt.errors import SemBlendError
from semblend_trt.metrics import COLD_RUN_RESULTS
from tests.semblend_trt.fleet.router.conftest import router

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_equal_means_equal_and_else_the_first_difference_is_told(first, cold):
    told = compared([first], [cold])
    assert told["compared"] == "tokens"
    assert (told["result"] == "equal") == (first == cold)
    if first != cold:
        at = told["first_difference"]
        assert first[:at] == cold[:at]
        assert first[at : at + 1] != cold[at : at + 1]


def test_every_choice_is_compared_as_text_where_tokens_are_not_told():
    assert compared(["one", "two"], ["one", "two"]) == {"result": "equal", "compared": "text"}
    differs = {"result": "differs", "compared": "text", "first_difference": 1}
    assert compared(["one", "two"], ["one", "toe"]) == differs
    assert compared(["one", "two"], ["one"])["result"] == "failed"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        *((each, False) for each in ({}, {"temperature": 0.7, "top_k": 2})),
        *((each, True) for each in ({"temperature": 0}, {"temperature": 1.0, "seed": 0})),
        ({"temperature": 0.7, "top_k": 1}, True),
    ],
)
def test_what_is_sampled_without_a_seed_cannot_be_repeated(fields, expected):
    assert (cold_body({"prompt": "a", **fields}) is not None) == expected


async def _ends():
    """Lets everything that can run come to its end."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_the_sample_runs_one_at_a_time_and_what_finds_no_room_is_skipped():
    counts, running = Counter(), asyncio.Lock()

    async def run():
        runs, go_on = ColdRuns(1.0, lambda result: counts.update([result])), asyncio.Event()

        async def cold():
            assert not running.locked()
            async with running:
                await go_on.wait()
            return [[1, 2]]

        for _ in range(MAX_WAITING + 3):
            runs.later([[1, 2]], cold)  # does not wait
        assert counts == {"skipped": 3}
        go_on.set()
        await _ends()
        assert counts == {"skipped": 3, "equal": MAX_WAITING}
        runs.later([[1, 3]], cold)
        await _ends()
        assert counts["differs"] == 1
        go_on.clear()
        runs.later([[1, 2]], cold)
        await _ends()
        await runs.close()
        assert sum(counts.values()) == MAX_WAITING + 4

    asyncio.run(run())
    assert counts.keys() <= set(COLD_RUN_RESULTS)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(SemBlendError("no room"), "no room"), (ValueError("inside"), "the cold run failed; the log says why")],
)
def test_a_cold_run_that_fails_is_told_and_fails_no_answer(error, reason):
    counted = []

    async def cold():
        raise error

    verdict = asyncio.run(ColdRuns(0.0, counted.append).verdict([[1]], cold))
    assert verdict == {"result": "failed", "reason": reason}
    assert counted == ["failed"]


def stream_of(*choices):
    events = b"".join(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices)
    return events + b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("text", ["", "two words", "é\u2028\n", "data: [DONE]"])
def test_a_streamed_answer_says_what_the_whole_one_says(text):
    parts = [{"index": 0, "text": text[:3]}, {"index": 1, "text": "b"}, {"index": 0, "text": text[3:]}]
    whole = json.dumps({"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": text}]}).encode()
    assert said_in(stream_of(*parts)) == said_in(whole) == [text, "b"]
    deltas = [{"delta": {"role": "assistant", "content": ""}}, *({"delta": {"content": each}} for each in text)]
    chat = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
    assert said_in(stream_of(*deltas)) == said_in(chat) == [text]


def test_calls_are_compared_without_their_ids_and_tokens_go_before_text():
    def call(number, name, arguments):
        return {"id": f"call-{number}", "function": {"name": name, "arguments": arguments}}

    whole = {"message": {"content": None, "reasoning_content": "So", "tool_calls": [call(1, "find", "{}")]}}
    deltas = [{"reasoning": "So"}, {"tool_calls": [call(2, "find", "{")]}, {"tool_calls": [call(2, None, "}")]}]
    assert said_in(json.dumps({"choices": [whole]}).encode()) == ["Sofind{}"]
    assert said_in(stream_of(*({"delta": each} for each in deltas))) == ["Sofind{}"]
    assert said_in(b'{"choices": [{"text": "a", "token_ids": [4, 5]}]}') == [[4, 5]]


def test_a_cold_run_has_a_salt_of_its_own_and_is_not_streamed():
    body = {"prompt": "a", "temperature": 0, "stream": True, "stream_options": {}, "cache_salt": "acme", "stop": ["b"]}
    first, second = (json.loads(cold_body({**body, "kv_transfer_params": {"x": 1}})) for _ in range(2))
    assert first.pop("cache_salt") != second.pop("cache_salt") != "acme"
    asked = {"prompt": "a", "temperature": 0, "stop": ["b"], "kv_transfer_params": {"x": 1, "semblend.cold": True}}
    assert first == second == asked


VERIFY = {VERIFY_HEADER: " Cold "}
KEYS = [
    {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenants": ["acme"], "verify": name == "checking"}
    for name in ("checking", "plain")
]
CHECKING, PLAIN = ({"Authorization": f"Bearer {name}"} for name in ("checking", "plain"))
ASKED = {"prompt": "abc", "temperature": 0}


def results(parts):
    found = {each: parts.count("semblend_router_cold_runs_total", result=each) for each in COLD_RUN_RESULTS}
    return {result: count for result, count in found.items() if count}


@router(replicas=1, keys=KEYS)
async def test_the_router_asks_a_second_time_and_says_whether_both_are_equal(parts):
    replica = parts.replicas[0]
    replica.receipt = {"reused_tokens": 3}
    status, answer, headers = await parts.ask(**ASKED, headers=CHECKING | VERIFY)
    assert (status, headers["X-SemBlend-Worker"]) == (200, "1.0")
    assert answer["choices"] == [{"text": "1"}]
    assert answer["usage"]["semblend"] == {"reused_tokens": 3, "verified": {"result": "equal", "compared": "tokens"}}
    first, cold = replica.bodies
    assert cold["kv_transfer_params"] == {"semblend.cold": True}
    assert first["cache_salt"] != cold["cache_salt"]
    assert VERIFY_HEADER not in replica.headers[0]
    replica.cold_text = "2"
    _, answer, _ = await parts.ask(**ASKED, headers=CHECKING | VERIFY, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [49]
    differs = {"result": "differs", "compared": "tokens", "first_difference": 0}
    assert answer["usage"]["semblend"]["verified"] == differs
    assert results(parts) == {"equal": 1, "differs": 1}


@router(replicas=1, keys=KEYS)
async def test_an_answer_comes_also_where_nothing_can_be_compared(parts):
    replica = parts.replicas[0]
    _, answer, _ = await parts.ask(prompt="abc", headers=CHECKING | VERIFY)
    assert answer["usage"]["semblend"]["verified"]["result"] == "not_comparable"
    assert len(replica.bodies) == 1
    replica.cold_text = ""
    status, answer, _ = await parts.ask(**ASKED, headers=CHECKING | VERIFY)
    assert (status, answer["choices"][0]["text"]) == (200, "1")
    failed = {"result": "failed", "reason": "replica 1.0 answered with status 500"}
    assert answer["usage"]["semblend"]["verified"] == failed
    assert results(parts) == {"not_comparable": 1, "failed": 1}


@router(replicas=1, keys=KEYS)
async def test_what_is_streamed_is_sent_on(parts):
    replica = parts.replicas[0]
    replica.receipt = {"reused_tokens": 3}
    streamed = await parts.read(**ASKED, stream=True, headers=CHECKING | VERIFY)
    assert b'"reused_tokens": 3' in streamed
    assert b"verified" not in streamed
    assert len(replica.bodies) == 1
    assert results(parts) == {}


@pytest.mark.parametrize(
    ("headers", "status", "reason"),
    [(PLAIN | VERIFY, 403, "verify_forbidden"), (CHECKING | {VERIFY_HEADER: "yes"}, 400, "bad_verify")],
)
@router(keys=KEYS)
async def test_a_key_needs_the_right(parts, headers, status, reason):
    got, answer, _ = await parts.ask(**ASKED, headers=headers)
    assert (got, answer["error"]["code"]) == (status, reason)
    assert parts.count("semblend_router_refusals_total", reason=reason) == 1
    assert [replica.bodies for replica in parts.replicas] == [[], []]


@router(replicas=1, audit_sample=1.0)
async def test_the_sample_is_compared_behind_whole_and_streamed_answers(parts):
    replica = parts.replicas[0]
    _, answer, _ = await parts.ask(**ASKED)
    assert "semblend" not in answer["usage"]
    while sum(results(parts).values()) < 1:
        await asyncio.sleep(0)
    replica.cold_text = "first2"
    await parts.read(**ASKED, stream=True)
    while sum(results(parts).values()) < 2:
        await asyncio.sleep(0)
    assert [bool(body.get("stream")) for body in replica.bodies] == [False, False, True, False]
    replica.receipt = {"reused_tokens": 0}
    await parts.ask(**ASKED)
    await _ends()
    assert len(replica.bodies) == 5  # where nothing was reused there is nothing to compare
    assert results(parts) == {"equal": 1, "differs": 1}


JUDGED = ASKED | {"max_tokens": 1}
BOUNDED = {"profile": "a" * 64, "max_kl": 0.01, "risk": 0.2, "sampled_tokens": 9, "reused_tokens": 3}


def checks(parts):
    found = {each: parts.count("semblend_router_bound_checks_total", result=each) for each in CHECK_RESULTS}
    return {result: count for result, count in found.items() if count}


async def _judged(parts, times=1):
    """Asks, and waits for each comparison."""
    for _ in range(times):
        before = sum(results(parts).values())
        status, answer, _ = await parts.ask(**JUDGED)
        assert (status, answer["choices"][0].get("logprobs")) == (200, None)
        while sum(results(parts).values()) == before:
            await asyncio.sleep(0)


@router(replicas=1, audit_sample=1.0)
async def test_spot_checks_break_the_promise_and_exact_reuse_alone_is_asked_for_under_that_profile(parts):
    replica = parts.replicas[0]
    replica.receipt, replica.likelihood = BOUNDED, 0.52
    await _judged(parts, 3)
    assert checks(parts) == {"within": 3}
    replica.likelihood = 0.9
    while "broken" not in checks(parts):
        await _judged(parts)
        assert sum(checks(parts).values()) < 40
    await parts.ask(**JUDGED, kv_transfer_params={"mine": 1})
    asked = {"mine": 1, "semblend.broken_profiles": [BOUNDED["profile"]]}
    assert replica.bodies[-1]["kv_transfer_params"] == asked
    assert "semblend.broken_profiles" not in str(replica.bodies[:6])


@router(replicas=1, audit_sample=1.0)
async def test_an_answer_without_a_bound_tests_none_and_one_computed_whole_keeps_it_without_a_cold_run(parts):
    replica = parts.replicas[0]
    replica.receipt, replica.likelihood = BOUNDED | {"max_kl": None}, 0.9
    await _judged(parts)
    assert (checks(parts), results(parts), len(replica.bodies)) == ({}, {"equal": 1}, 2)
    replica.receipt = BOUNDED | {"reused_tokens": 0}
    await parts.ask(**JUDGED)
    assert (checks(parts), len(replica.bodies)) == ({"within": 1}, 3)


@router(replicas=1, audit_sample=1.0)
async def test_a_replica_that_tells_no_likelihoods_is_asked_again_and_its_answer_is_compared(parts):
    replica = parts.replicas[0]
    replica.receipt = BOUNDED
    status, _, _ = await parts.ask(**JUDGED | {"max_tokens": 0})
    assert (status, len(replica.bodies)) == (400, 2)  # the client's own fault
    await _judged(parts)
    assert ["logprobs" in body for body in replica.bodies] == [True, False, True, False, False]
    assert (checks(parts), results(parts)) == ({}, {"equal": 1})
