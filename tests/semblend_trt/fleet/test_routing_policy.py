"""Routing policies: each by its own rule, among healthy replicas only."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet import routing_policy
from semblend_trt.fleet.routing_policy import (
    BLOCK_TOKENS,
    POLICIES,
    Choice,
    ExactPrefix,
    Holder,
    LeastLoaded,
    NoReplicaError,
    PrefixMemory,
    Replica,
    RoundRobin,
    RoutingRequest,
    SpanOverlap,
)

WORKERS = [(number, 0) for number in range(4)]
PROMPT = list(range(1000))


def replicas(*loads):
    return [Replica(worker, load) for worker, load in zip(WORKERS, loads, strict=False)]


def request(*held, **more):
    holders = tuple(Holder(worker, tokens) for worker, tokens in zip(WORKERS, held, strict=False) if tokens)
    return RoutingRequest(PROMPT, holders=holders, **more)


@pytest.mark.parametrize("name", POLICIES)
def test_only_healthy_replicas_are_chosen(name):
    policy = POLICIES[name]()
    some = [Replica(worker, 0.0, is_healthy=worker == WORKERS[2]) for worker in WORKERS]
    for _ in range(5):
        assert policy.choose(request(1000, session_id="s"), some).worker == WORKERS[2]
    for none in ([], [Replica(WORKERS[0], 0.0, is_healthy=False)]):
        with pytest.raises(NoReplicaError, match=f"none of {len(none)} replicas"):
            policy.choose(request(), none)


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "span_overlap"])
def test_equal_replicas_take_turns(name):
    policy = POLICIES[name]()
    chosen = Counter(policy.choose(request(), replicas(5, 5, 5, 5)).worker for _ in range(40))
    assert chosen == dict.fromkeys(WORKERS, 10)


def test_round_robin_looks_at_nothing_else():
    policy = RoundRobin()
    chosen = [policy.choose(request(0, 900), replicas(9, 0, 5)) for _ in range(6)]
    assert [choice.worker[0] for choice in chosen] == [0, 1, 2, 0, 1, 2]
    assert chosen[1] == Choice(WORKERS[1], 900)


def test_least_loaded_takes_the_smallest_load():
    assert LeastLoaded().choose(request(1000), replicas(3, 2, 1.5, 7)).worker == WORKERS[2]


def test_exact_prefix_follows_the_longest_beginning_that_it_sent():
    policy = ExactPrefix()
    first = policy.choose(request(), replicas(0, 1, 1, 1))
    assert first == Choice(WORKERS[0], 0)
    busy = replicas(1e6, 0, 0, 0)
    assert policy.choose(RoutingRequest(PROMPT[:500] + [7] * 500), busy) == Choice(WORKERS[0], 480)
    assert policy.choose(RoutingRequest([7, *PROMPT]), busy).worker != WORKERS[0]
    assert policy.choose(RoutingRequest(PROMPT, tenant_salt="acme"), busy).worker != WORKERS[0]


@given(
    st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    st.lists(st.integers(0, 3000), min_size=4, max_size=4),
    st.sampled_from([0.25, 1.0, 2.0]),
)
def test_span_overlap_begins_to_answer_first(held, loads, weight):
    chosen = SpanOverlap(weight).choose(request(*held), replicas(*loads))
    waits = {
        worker: weight * load + len(PROMPT) - reused for worker, load, reused in zip(WORKERS, loads, held, strict=True)
    }
    assert waits[chosen.worker] == min(waits.values())
    assert chosen.reused_tokens == held[chosen.worker[0]]


def test_a_session_decides_between_equals_only():
    policy = SpanOverlap()
    first = policy.choose(request(session_id="s"), replicas(0, 0, 0, 0)).worker
    for _ in range(3):
        assert policy.choose(request(session_id="s"), replicas(0, 0, 0, 0)).worker == first
    for other in (request(), request(session_id="t"), request(session_id="s", tenant_salt="acme")):
        assert policy.choose(other, replicas(0, 0, 0, 0)).worker != first
    assert policy.choose(request(0, 0, 0, 5, session_id="s"), replicas(0, 0, 0, 0)).worker == WORKERS[3]


def test_sessions_are_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr(routing_policy, "MAX_SESSIONS", 3)
    policy = SpanOverlap()
    chosen = [policy.choose(request(session_id=str(number)), replicas(0, 0, 0, 0)).worker for number in range(4)]
    assert policy.choose(request(session_id="3"), replicas(0, 0, 0, 0)).worker == chosen[3]
    assert len(policy._sessions) == 3


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_is_not_positive_is_refused(weight):
    with pytest.raises(ValueError, match="load weight"):
        SpanOverlap(weight)


A, B = (0, 0), (1, 0)


def test_the_oldest_blocks_go_first_and_of_a_prompt_its_end(monkeypatch):
    monkeypatch.setattr(routing_policy, "MAX_BLOCKS", 5)
    memory = PrefixMemory()
    first, second = ([seed] * 3 * BLOCK_TOKENS for seed in (1, 2))
    for prompt in (first, second):
        memory.note(memory.prefix_of(prompt, None), A)
    assert memory.known(memory.prefix_of(second, None), [A]) == {A: 3 * BLOCK_TOKENS}
    assert memory.known(memory.prefix_of(first, None), [A]) == {A: 2 * BLOCK_TOKENS}
    long = [3] * 50 * BLOCK_TOKENS
    memory.note(memory.prefix_of(long, None), A)
    assert memory.known(memory.prefix_of(long, None), [A]) == {A: 5 * BLOCK_TOKENS}


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 1)), max_size=20), st.data())
def test_it_knows_what_a_list_of_all_prompts_would(sent, data):
    memory = PrefixMemory()
    workers = [A, B]

    def prompt_of(blocks):
        return [token for block in blocks for token in [block] * BLOCK_TOKENS]

    for blocks, worker in sent:
        memory.note(memory.prefix_of(prompt_of(blocks), None), workers[worker])
    asked = data.draw(st.lists(st.integers(0, 1), max_size=6))
    expected = {}
    for number, worker in enumerate(workers):
        common = [
            next((at for at, pair in enumerate(zip(blocks, asked, strict=False)) if pair[0] != pair[1]),
                 min(len(blocks), len(asked)))
            for blocks, to in sent
            if to == number
        ]  # fmt: skip
        expected[worker] = BLOCK_TOKENS * max(common, default=0)
    assert memory.known(memory.prefix_of(prompt_of(asked), None), workers) == expected
