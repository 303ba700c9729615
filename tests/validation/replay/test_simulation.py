"""What a cache holds, what counts as reused, the order of every policy, and the optimum against all others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.validation.replay.test_trace import line
from validation.replay.simulation import EXACT_PREFIX, OPTIMUM, POLICIES, BlockCache, ReuseRule, simulate
from validation.replay.trace import NONE, TraceBlock, trace_of

TOKENS = {"header": 100, "other": 100, "document": 500, "small": 20, **dict.fromkeys("uvwxyz", 30)}
SPAN = ReuseRule("span", min_tokens=64, recompute_tokens=16)
SIZES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 9, "g": 40}
# The last token of a prompt is never reused; a block that stands in each prompt once and is never held pays for that.
EQUAL = {**dict.fromkeys("abcdefg", 10), "own": 1_000_000}


def trace_from(requests, tokens):
    """A trace of requests, each a sequence of contents, given the tokens of each content."""
    return trace_of(line(i, names, [tokens[name] for name in names]) for i, names in enumerate(requests))


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


@pytest.mark.promise("commands", "`python -m validation replay` says which...")
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(30, 4), places=st.integers(4, 6))
def test_no_policy_hits_more_than_the_optimum_where_blocks_have_one_size(as_prefixes, requests, places):
    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL)
    blocks = trace.prefixes() if as_prefixes else trace
    found = {name: sum(simulate(blocks, ReuseRule("rule"), name, 10 * places)[0]) for name in (*POLICIES, OPTIMUM)}
    assert max(found.values()) == found[OPTIMUM]


@pytest.mark.parametrize(
    ("policy", "gone"), [("fifo", "third"), ("lru", "first"), ("lfu", "second"), ("static_semantic", "last")]
)
def test_each_policy_evicts_by_its_own_order(policy, gone):
    """In the order of arrival, of the last use, of uses, or of the weight of a kind."""
    kinds = {"third": "code", "first": "system", "second": "tool", "last": "user", "new": "other"}
    asked = [*[*kinds][:4], "first", "first", "second", "third", "last", "last", "new"]
    blocks = [[TraceBlock(content_hash=each, token_count=10, semantic_type=kinds[each])] for each in asked]
    trace = trace_of(line(index, [], [], blocks=each) for index, each in enumerate(blocks))
    cache = BlockCache(trace, POLICIES[policy](), 40)
    for _, request in trace.requests:
        cache.serve(request)
    assert set(range(5)) - set(cache.held) == {[*kinds].index(gone)}
