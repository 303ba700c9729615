"""The cache's invariants under every policy, and LRU against a list that is searched from the front."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.donors.eviction import Eviction, eviction_factory
from validation.replay.blocks import NONE
from validation.replay.cache import BlockCache

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from validation.replay.trace import Trace

TOKENS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 9, "g": 40}
REQUESTS = st.lists(st.lists(st.sampled_from(list(TOKENS)), min_size=1, max_size=6), min_size=1, max_size=25)
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
    trace = trace_from(requests, TOKENS)
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
    trace = trace_from(requests, TOKENS)
    blocks = trace.prefixes if as_prefixes else trace.spans
    cache = BlockCache(blocks, eviction_factory(Eviction.LRU, lambda: 0.0)(), capacity)
    named: list[list[Hashable]] = [
        list(accumulate(((name,) for name in request), lambda all_before, one: all_before + one))
        if as_prefixes
        else list(request)
        for request in requests
    ]
    tokens = {name: TOKENS[name[-1] if isinstance(name, tuple) else name] for names in named for name in names}
    for (seconds, request), names, expected in zip(
        trace.requests(as_prefixes=as_prefixes), named, naive_lru(named, tokens, capacity), strict=True
    ):
        hits = cache.serve(request, seconds)
        assert {name for name, block in zip(names, request, strict=True) if block in hits} == expected


def test_what_comes_back_after_it_went_is_a_regret(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["d"], ["e"], ["d"], ["d"]], TOKENS)
    cache = BlockCache(trace.spans, eviction_factory(Eviction.LRU, lambda: 0.0)(), 8)
    hits = [len(cache.serve(request, seconds)) for seconds, request in trace.requests(as_prefixes=False)]
    assert (hits, cache.evictions, cache.regrets) == ([0, 0, 0, 1], 2, 1)


def test_what_is_shared_with_nobody_is_not_held(trace_from: Callable[..., Trace]) -> None:
    trace = trace_from([["c"], ["c"]], TOKENS)
    cache = BlockCache(trace.spans, eviction_factory(Eviction.LRU, lambda: 0.0)(), 8)
    served = [cache.serve([NONE, *request], seconds) for seconds, request in trace.requests(as_prefixes=False)]
    assert served == [frozenset(), frozenset({0})]
    assert cache.serve([], 9.0) == frozenset()
    assert cache.used_tokens == TOKENS["c"]
