"""Which tokens count as reused, under each rule."""

from __future__ import annotations

import functools
from itertools import accumulate, combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.donors.eviction import Eviction, eviction_factory
from validation.replay.simulation import OPTIMUM, BlockCache, ReuseRule, simulate
from validation.replay.trace import NONE, trace_of
from validation.replay.workloads import workload_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from validation.replay.trace import Trace

TOKENS = {"header": 100, "other": 100, "document": 500, "small": 20}
PREFIX, SPAN = ReuseRule("exact_prefix", True), ReuseRule("span", False, min_tokens=64, recompute_tokens=16)


def test_behind_another_header_only_spans_count(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["header", "document"], ["other", "document"], ["header", "document", "small"]], TOKENS)
    assert simulate(trace, PREFIX, "lru", 10_000).reused.tolist() == [0, 0, 600]
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 500 - 16, 600 - 16]


def test_short_spans_do_not_count_and_the_last_token_is_always_computed(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["small"], ["small"], ["header"], ["header"]], TOKENS)
    assert simulate(trace, PREFIX, "lru", 10_000).reused.tolist() == [0, 19, 0, 99]
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 0, 0, 84]


def test_a_block_that_stands_in_a_prompt_twice_is_not_its_own_hit(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["header", "header", "small"], ["header", "small", "header"]], TOKENS)
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 120 - 16 + 100 - 16]


def test_short_blocks_make_a_span_where_they_stand_as_they_stood_when_they_came(
    trace_from: Callable[..., Trace],
) -> None:
    small = dict.fromkeys("abcdef", 30)
    trace = trace_from(
        [["header", *"abcd"], ["other", *"abcd"], ["other", *"dcba"], ["other", *"bcefab"]], TOKENS | small
    )
    # In the last one `other`, b c, and a b are spans of at least 64 tokens only where they are long enough.
    assert simulate(trace, SPAN, "lru", 10_000).reused.tolist() == [0, 120 - 16, 84, 84]


@pytest.mark.parametrize("rule", [PREFIX, SPAN])
def test_policies_differ_and_equal_traces_give_equal_outcomes(rule: ReuseRule) -> None:
    def reused(policy: str) -> list[int]:
        trace = trace_of(workload_lines("rag_shared_corpus", 150, 3))
        return simulate(trace, rule, policy, 12_000).reused.tolist()

    assert reused("adaptive_semantic") == reused("adaptive_semantic")
    assert len({sum(reused(policy)) for policy in ("lru", "lfu", "size_aware", "adaptive_semantic")}) == 4


@pytest.mark.parametrize(("workload", "other"), [("tool_agent_session_reuse", "lru"), ("rag_shared_corpus", "lfu")])
def test_the_adaptive_policy_comes_close_to_the_plain_one_that_fits(workload: str, other: str) -> None:
    """Turns of conversations want the least recently used to go, documents of a corpus the least often used."""
    trace = trace_of(workload_lines(workload, 400, 0))
    capacity = sum(trace.spans.tokens) // 4
    adaptive, plain = (simulate(trace, SPAN, policy, capacity).reused.sum() for policy in ("adaptive_semantic", other))
    assert adaptive > 0.97 * plain


SIZES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 9, "g": 40}
REQUESTS = st.lists(st.lists(st.sampled_from(list(SIZES)), min_size=1, max_size=6), min_size=1, max_size=25)
CAPACITIES = st.integers(1, 30)


@pytest.mark.parametrize("policy", list(Eviction))
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=REQUESTS, capacity=CAPACITIES)
def test_what_holds_after_every_request(
    trace_from: Callable[..., Trace],
    policy: Eviction,
    as_prefixes: bool,
    requests: list[list[str]],
    capacity: int,
) -> None:
    trace = trace_from(requests, SIZES)
    blocks = trace.prefixes if as_prefixes else trace.spans
    now = [0.0]
    cache = BlockCache(blocks, eviction_factory(policy, lambda: now[0])(), capacity)
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


def naive_lru(
    requests: Sequence[Sequence[Hashable]], tokens: dict[Hashable, int], capacity: int
) -> list[set[Hashable]]:
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
@given(requests=REQUESTS, capacity=CAPACITIES)
def test_lru_hits_what_a_naive_list_hits(
    trace_from: Callable[..., Trace], as_prefixes: bool, requests: list[list[str]], capacity: int
) -> None:
    trace = trace_from(requests, SIZES)
    blocks = trace.prefixes if as_prefixes else trace.spans
    cache = BlockCache(blocks, eviction_factory(Eviction.LRU, lambda: 0.0)(), capacity)
    named: list[list[Hashable]] = [
        list(accumulate(((name,) for name in request), lambda all_before, one: all_before + one))
        if as_prefixes
        else list(request)
        for request in requests
    ]
    tokens = {name: SIZES[name[-1] if isinstance(name, tuple) else name] for names in named for name in names}
    for (seconds, request), names, expected in zip(
        trace.requests(as_prefixes=as_prefixes), named, naive_lru(named, tokens, capacity), strict=True
    ):
        hits = cache.serve(request, seconds)
        assert {name for name, block in zip(names, request, strict=True) if block in hits} == expected


def test_what_comes_back_after_it_went_is_a_regret(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["d"], ["e"], ["d"], ["d"]], SIZES)
    cache = BlockCache(trace.spans, eviction_factory(Eviction.LRU, lambda: 0.0)(), 8)
    hits = [len(cache.serve(request, seconds)) for seconds, request in trace.requests(as_prefixes=False)]
    assert (hits, cache.evictions, cache.regrets) == ([0, 0, 0, 1], 2, 1)


def test_what_is_shared_with_nobody_is_not_held(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["c"], ["c"]], SIZES)
    cache = BlockCache(trace.spans, eviction_factory(Eviction.LRU, lambda: 0.0)(), 8)
    served = [cache.serve([NONE, *request], seconds) for seconds, request in trace.requests(as_prefixes=False)]
    assert served == [frozenset(), frozenset({0})]
    assert cache.serve([], 9.0) == frozenset()
    assert cache.used_tokens == SIZES["c"]


EQUAL = dict.fromkeys("abcdefg", 10)
# The last token of a prompt is never reused; a block that stands in each prompt once and is never held pays for that.
UNSHARED = {"own": 1_000_000}


def requests_of(most: int, longest: int) -> st.SearchStrategy[list[list[str]]]:
    return st.lists(st.lists(st.sampled_from(list(EQUAL)), min_size=1, max_size=longest), min_size=1, max_size=most)


@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(30, 5), places=st.integers(1, 6))
def test_no_policy_hits_more_where_blocks_have_one_size(
    trace_from: Callable[..., Trace], as_prefixes: bool, requests: list[list[str]], places: int
) -> None:
    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL | UNSHARED)
    rule = ReuseRule("rule", as_prefixes)
    best = simulate(trace, rule, OPTIMUM, 10 * places).reused.sum()
    for policy in Eviction:
        assert simulate(trace, rule, policy.value, 10 * places).reused.sum() <= best


@settings(max_examples=30)
@given(requests=requests_of(6, 3), places=st.integers(1, 3))
def test_it_hits_as_much_as_any_choice_could(
    trace_from: Callable[..., Trace], requests: list[list[str]], places: int
) -> None:
    sets = [frozenset(request) for request in requests]

    @functools.cache
    def best(index: int, held: frozenset[str]) -> int:
        if index == len(sets):
            return 0
        could = held | sets[index]
        kept = [frozenset(each) for size in range(places + 1) for each in combinations(sorted(could), size)]
        return len(held & sets[index]) + max(best(index + 1, each) for each in kept)

    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL | UNSHARED)
    found = simulate(trace, ReuseRule("rule", as_prefixes=False), OPTIMUM, 10 * places)
    assert found.reused.sum() == 10 * best(0, frozenset())
