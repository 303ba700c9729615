"""What a cache holds and lets go, which tokens count as reused, and the optimum against all that could be done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import policy_of
from validation.replay.policies import ReplayPolicy, replay_policy
from validation.replay.simulation import OPTIMUM, BlockCache, ReuseRule, simulate
from validation.replay.trace import NONE, Trace

Maker = Callable[..., Trace]

TOKENS = {"header": 100, "other": 100, "document": 500, "small": 20, **dict.fromkeys("uvwxyz", 30)}
PREFIX, SPAN = ReuseRule("exact_prefix", True), ReuseRule("span", False, min_tokens=64, recompute_tokens=16)
SIZES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 9, "g": 40}
# The last token of a prompt is never reused; a block that stands in each prompt once and is never held pays for that.
EQUAL = {**dict.fromkeys("abcdefg", 10), "own": 1_000_000}


def requests_of(most, longest):
    return st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=longest), min_size=1, max_size=most)


def lru(blocks, capacity):
    return BlockCache(blocks, policy_of(Eviction.LRU), capacity)


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
def test_what_counts_as_reused(trace_from, requests, by_prefix, by_span):
    trace = trace_from(requests, TOKENS)
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == by_span
    assert by_prefix is None or simulate(trace, PREFIX, "lru", 10_000).reused.tolist() == by_prefix


def test_policies_differ_and_equal_traces_give_equal_outcomes(corpus):
    def reused(policy):
        return simulate(corpus(150), SPAN, policy, 12_000).reused.tolist()

    assert reused("adaptive_semantic") == reused("adaptive_semantic")
    assert len({sum(reused(policy)) for policy in ("lru", "lfu", "size_aware", "adaptive_semantic")}) == 4


@pytest.mark.parametrize(("name", "other"), [("conversations", "lru"), ("corpus", "lfu")])
def test_the_adaptive_policy_comes_close_to_the_plain_one_that_fits(name, other, request):
    """Turns of conversations want the least recently used to go, documents of a corpus the least often used."""
    trace = request.getfixturevalue(name)(400)
    capacity = sum(trace.spans.tokens) // 4
    adaptive, plain = (simulate(trace, SPAN, policy, capacity).reused.sum() for policy in ("adaptive_semantic", other))
    assert adaptive > 0.97 * plain


@pytest.mark.parametrize("policy", list(ReplayPolicy))
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(25, 6), capacity=st.integers(1, 30))
def test_what_holds_after_every_request(trace_from, policy, as_prefixes, requests, capacity):
    trace = trace_from(requests, SIZES)
    blocks = trace.prefixes if as_prefixes else trace.spans
    now = [0.0]
    cache = BlockCache(blocks, replay_policy(policy, lambda: now[0]), capacity)
    for seconds, request in trace.requests(as_prefixes=as_prefixes):
        now[0] = seconds
        before = {block for block in range(len(blocks)) if block in cache}
        hits = cache.serve(request, seconds)
        held = {block for block in range(len(blocks)) if block in cache}
        assert hits == before & set(request)
        assert hits <= held <= before | set(request)  # a request evicts none of its own
        assert cache.used_tokens == sum(blocks.tokens[block] for block in held) <= capacity
        assert all(blocks.parents[block] in held | {NONE} for block in held)
        if sum(blocks.tokens[block] for block in set(request)) <= capacity:
            assert set(request) <= held


def naive_lru(requests, tokens, capacity):
    """Hits of each request; a tuple is held only behind its beginning."""
    held: list[Hashable] = []  # least recently used first
    found = []
    for names in requests:
        request = [name for name in dict.fromkeys(names) if tokens[name] <= capacity]
        hits = {name for name in request if name in held}
        found.append(hits)
        room = capacity - sum(tokens[name] for name in hits)
        missing: list[Hashable] = []
        for name in request:
            has_parent = not isinstance(name, tuple) or len(name) == 1 or name[:-1] in hits or name[:-1] in missing
            if name not in hits and has_parent and tokens[name] <= room:
                missing.append(name)
                room -= tokens[name]
        while sum(tokens[name] for name in [*held, *missing]) > capacity:
            held.remove(next(name for name in held if name not in hits))
        kept = [name for name in request if name in hits or name in missing]
        held = [name for name in held if name not in hits] + kept[::-1]
    return found


@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(25, 6), capacity=st.integers(1, 30))
def test_lru_hits_what_a_naive_list_hits(trace_from, as_prefixes, requests, capacity):
    trace = trace_from(requests, SIZES)
    cache = lru(trace.prefixes if as_prefixes else trace.spans, capacity)
    named: list[list[Hashable]] = [
        list(accumulate((name,) for name in request)) if as_prefixes else list(request) for request in requests
    ]
    tokens = {name: SIZES[name[-1] if isinstance(name, tuple) else name] for names in named for name in names}
    served = trace.requests(as_prefixes=as_prefixes)
    for (seconds, request), names, expected in zip(served, named, naive_lru(named, tokens, capacity), strict=True):
        hits = cache.serve(request, seconds)
        assert {name for name, block in zip(names, request, strict=True) if block in hits} == expected


def test_what_comes_back_after_it_went_is_a_regret(trace_from):
    trace = trace_from([["d"], ["e"], ["d"], ["d"]], SIZES)
    cache = lru(trace.spans, 8)
    hits = [len(cache.serve(request, seconds)) for seconds, request in trace.requests(as_prefixes=False)]
    assert (hits, cache.evictions, cache.regrets) == ([0, 0, 0, 1], 2, 1)


def test_what_no_other_request_has_is_not_held(trace_from):
    trace = trace_from([["c"], ["c"]], SIZES)
    cache = lru(trace.spans, 8)
    served = [cache.serve([NONE, *request], seconds) for seconds, request in trace.requests(as_prefixes=False)]
    assert served == [frozenset(), frozenset({0})]
    assert cache.serve([], 9.0) == frozenset()
    assert cache.used_tokens == SIZES["c"]


@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(30, 5), places=st.integers(1, 6))
def test_no_policy_hits_more_than_the_optimum_where_blocks_have_one_size(trace_from, as_prefixes, requests, places):
    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL)
    rule = ReuseRule("rule", as_prefixes)
    best = simulate(trace, rule, OPTIMUM, 10 * places).reused.sum()
    assert all(simulate(trace, rule, policy.value, 10 * places).reused.sum() <= best for policy in Eviction)


@settings(max_examples=30)
@given(requests=requests_of(6, 3), places=st.integers(1, 3))
def test_the_optimum_hits_as_much_as_any_choice_could(trace_from, requests, places):
    sets = [frozenset(request) for request in requests]

    @functools.cache
    def best(index, held):
        if index == len(sets):
            return 0
        could = held | sets[index]
        kept = [frozenset(each) for size in range(places + 1) for each in combinations(sorted(could), size)]
        return len(held & sets[index]) + max(best(index + 1, each) for each in kept)

    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL)
    found = simulate(trace, ReuseRule("rule", as_prefixes=False), OPTIMUM, 10 * places)
    assert found.reused.sum() == 10 * best(0, frozenset())
