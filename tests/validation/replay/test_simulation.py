"""What a cache holds, what counts as reused, the order of every policy, and the optimum against all others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.validation.replay.conftest import line, trace_from
from validation.replay.simulation import (
    EXACT_PREFIX,
    OPTIMUM,
    POLICIES,
    WEIGHTS,
    BlockCache,
    BlockHistory,
    ReuseRule,
    simulate,
)
from validation.replay.trace import NONE, trace_of

TOKENS = {"header": 100, "other": 100, "document": 500, "small": 20, **dict.fromkeys("uvwxyz", 30)}
SPAN = ReuseRule("span", min_tokens=64, recompute_tokens=16)
SIZES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 9, "g": 40}
# The last token of a prompt is never reused; a block that stands in each prompt once and is never held pays for that.
EQUAL = {**dict.fromkeys("abcdefg", 10), "own": 1_000_000}


def requests_of(most, longest):
    return st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=longest), min_size=1, max_size=most)


@pytest.mark.parametrize(
    ("requests", "by_prefix", "by_span"),
    [
        pytest.param(
            [["header", "document"], ["other", "document"], ["header", "document", "small"]],
            [0, 0, 600],
            [0, 500 - 16, 600 - 16],
            id="behind another header only spans count",
        ),
        pytest.param(
            [["small"], ["small"], ["header"], ["header"]],
            [0, 19, 0, 99],
            [0, 0, 0, 84],
            id="short spans do not count, and the last token is always computed",
        ),
        pytest.param(
            [["header", "header", "small"], ["header", "small", "header"]],
            [0, 100],
            [0, 120 - 16 + 100 - 16],
            id="a block that stands in a prompt twice is not its own hit",
        ),
        pytest.param(
            # In the last one `other`, v w, and u v are spans of at least 64 tokens only where they are long enough.
            [["header", *"uvwx"], ["other", *"uvwx"], ["other", *"xwvu"], ["other", *"vwyzuv"]],
            None,
            [0, 120 - 16, 84, 84],
            id="short blocks make a span where they stand as they stood when they came",
        ),
    ],
)
def test_what_counts_as_reused(requests, by_prefix, by_span):
    trace = trace_from(requests, TOKENS)
    assert simulate(trace, SPAN, "lru", 10_000)[0] == by_span
    assert by_prefix is None or simulate(trace.prefixes(), EXACT_PREFIX, "lru", 10_000)[0] == by_prefix


def corpus(requests):
    """A trace of N prompts, each of a header, four documents of a corpus in any order, and its question."""
    random, tokens = np.random.default_rng(3), np.random.default_rng(4).integers(400, 800, 64)
    shares = 1.0 / np.arange(1, 65)
    drawn = [random.choice(64, 4, replace=False, p=shares / shares.sum()) for _ in range(requests)]
    return trace_of(
        line(i, ["header", *map(str, each), f"question {i}"], [300, *map(int, tokens[each]), 60])
        for i, each in enumerate(drawn)
    )


def test_policies_differ_and_equal_traces_give_equal_outcomes():
    def reused(policy):
        return simulate(corpus(150), SPAN, policy, 12_000)[0]

    assert reused("lfu") == reused("lfu")
    assert len({sum(reused(policy)) for policy in ("lru", "lfu", "size_aware")}) == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(25, 6), capacity=st.integers(1, 30))
def test_what_holds_after_every_request(policy, as_prefixes, requests, capacity):
    trace = trace_from(requests, SIZES)
    blocks = trace.prefixes() if as_prefixes else trace
    cache = BlockCache(blocks, POLICIES[policy](), capacity)
    for _, request in blocks.requests:
        before = set(cache.held)
        hits = set(cache.serve(request))
        held = set(cache.held)
        assert hits == before & set(request)
        assert hits <= held <= before | set(request)  # a request evicts none of its own
        assert cache.used_tokens == sum(blocks.tokens[block] for block in held) <= capacity
        assert all(blocks.parents[block] in held | {NONE} for block in held)
        if sum(blocks.tokens[block] for block in set(request)) <= capacity:
            assert set(request) <= held


def test_evictions_are_counted_and_what_no_other_request_has_is_not_held():
    trace = trace_from([["d"], ["e"], ["d"], ["d"]], SIZES)
    cache = BlockCache(trace, POLICIES["lru"](), 8)
    hits = [len(cache.serve([NONE, *request])) for _, request in trace.requests]
    assert (hits, cache.evictions) == ([0, 0, 0, 1], 2)
    assert cache.serve([]) == {}
    assert cache.used_tokens == SIZES["d"]


@pytest.mark.promise("commands", "`python -m validation replay` says which...")
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(30, 4), places=st.integers(4, 6))
def test_no_policy_hits_more_than_the_optimum_where_blocks_have_one_size(as_prefixes, requests, places):
    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL)
    blocks = trace.prefixes() if as_prefixes else trace
    found = {name: sum(simulate(blocks, ReuseRule("rule"), name, 10 * places)[0]) for name in (*POLICIES, OPTIMUM)}
    assert max(found.values()) == found[OPTIMUM]


WHAT = st.sampled_from(["add", "use", "remove", "evict"])
STEPS = st.lists(st.tuples(WHAT, st.integers(0, 5), st.integers(1, 300), st.sampled_from([*WEIGHTS])), max_size=60)


class Model:
    """A policy beside the histories that it follows."""

    def __init__(self, name):
        self.tick = 0
        self.policy = POLICIES[name]()
        self.held = {}

    def run(self, step, number, size, kind):
        donor_id = str(number)
        if step == "add" and donor_id not in self.held:
            self.tick += 1
            history = BlockHistory(size, self.tick, block=number, weight=WEIGHTS[kind], added=self.tick)
            self.held[donor_id] = history
            self.policy.used(donor_id, history)
        elif step == "use" and donor_id in self.held:
            history = self.held[donor_id]
            self.tick += 1
            history.last_use, history.uses = self.tick, history.uses + 1
            self.policy.used(donor_id, history)
        elif step in ("remove", "evict") and donor_id in self.held:
            del self.held[donor_id]
            self.policy.removed(donor_id, evicted=step == "evict")


RANKS = {
    "fifo": lambda held: held.added,
    "lru": lambda held: held.last_use,
    "lfu": lambda held: (held.uses, held.last_use),
    "static_semantic": lambda held: (held.weight, held.last_use),
}


@pytest.mark.parametrize("name", list(RANKS))
@given(steps=STEPS)
def test_order_is_that_of_the_definition(name, steps):
    model = Model(name)
    for step in steps:
        model.run(*step)
    assert list(model.policy.candidates()) == sorted(model.held, key=lambda donor: RANKS[name](model.held[donor]))
