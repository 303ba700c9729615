"""The optimum against every policy, and against all that could be done."""

from __future__ import annotations

import functools
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.donors.eviction import Eviction
from validation.replay.simulation import OPTIMUM, ReuseRule, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from validation.replay.trace import Trace

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
