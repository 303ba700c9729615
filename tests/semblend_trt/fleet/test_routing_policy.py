"""Routing policies: each by its own rule, among healthy replicas only."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet import routing_policy
from semblend_trt.fleet.directory import Holder
from semblend_trt.fleet.routing_policy import (
    BLOCK_TOKENS,
    POLICIES,
    ExactPrefix,
    Replica,
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
        with pytest.raises(routing_policy.NoReplicaError, match=f"none of {len(none)} replicas"):
            policy.choose(request(), none)


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "span_overlap"])
def test_equal_replicas_take_turns(name):
    policy = POLICIES[name]()
    chosen = Counter(policy.choose(request(), replicas(5, 5, 5, 5)).worker for _ in range(40))
    assert chosen == dict.fromkeys(WORKERS, 10)


def test_round_robin_looks_at_nothing_else():
    policy = routing_policy.RoundRobin()
    chosen = [policy.choose(request(0, 900), replicas(9, 0, 5)) for _ in range(6)]
    assert [choice.worker[0] for choice in chosen] == [0, 1, 2, 0, 1, 2]
    assert chosen[1] == routing_policy.Choice(WORKERS[1], 900)


def test_least_loaded_takes_the_smallest_load():
    assert routing_policy.LeastLoaded().choose(request(1000), replicas(3, 2, 1.5, 7)).worker == WORKERS[2]


def test_exact_prefix_follows_the_longest_beginning_that_it_sent():
    policy = ExactPrefix()
    first = policy.choose(request(), replicas(0, 1, 1, 1))
    assert first == routing_policy.Choice(WORKERS[0], 0)
    busy = replicas(1e6, 0, 0, 0)
    assert policy.choose(RoutingRequest(PROMPT[:500] + [7] * 500), busy) == routing_policy.Choice(WORKERS[0], 480)
    assert policy.choose(RoutingRequest([7, *PROMPT]), busy).worker != WORKERS[0]
    assert policy.choose(RoutingRequest(PROMPT, tenant_salt="acme"), busy).worker != WORKERS[0]


FOUR = dict.fromkeys(("min_size", "max_size"), 4)


@given(st.lists(st.integers(0, 1000), **FOUR), st.lists(st.integers(0, 3000), **FOUR), st.sampled_from([0.25, 1, 2.0]))
def test_span_overlap_begins_to_answer_first(held, loads, weight):
    chosen = SpanOverlap(weight).choose(request(*held), replicas(*loads))
    parts = zip(WORKERS, loads, held, strict=True)
    waits = {worker: weight * load + len(PROMPT) - reused for worker, load, reused in parts}
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


def known(policy, tokens, worker=(0, 0)):
    """How many leading tokens the policy knows that it sent to the worker, to which this prompt goes now."""
    return policy.choose(RoutingRequest(tokens), [Replica(worker, 0)]).reused_tokens


def test_the_oldest_blocks_go_first_and_of_a_prompt_its_end(monkeypatch):
    monkeypatch.setattr(routing_policy, "MAX_BLOCKS", 5)
    policy = ExactPrefix()
    first, second, long = ([seed] * count * BLOCK_TOKENS for seed, count in ((1, 3), (2, 3), (3, 50)))
    assert (known(policy, first), known(policy, second)) == (0, 0)
    assert known(policy, first) == 2 * BLOCK_TOKENS
    assert (known(policy, long), known(policy, long)) == (0, 5 * BLOCK_TOKENS)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 1)), max_size=20))
def test_it_knows_what_a_list_of_all_prompts_would(sent):
    policy, earlier = ExactPrefix(), []
    for blocks, worker in sent:
        to_it = [other for other, to in earlier if to == worker]
        common = [at for at in range(len(blocks) + 1) if any(other[:at] == blocks[:at] for other in to_it)]
        tokens = [token for block in blocks for token in [block] * BLOCK_TOKENS]
        assert known(policy, tokens, (worker, 0)) == BLOCK_TOKENS * max(common, default=0)
        earlier.append((blocks, worker))
