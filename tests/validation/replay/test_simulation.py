"""What a cache holds, what counts as reused, the order of every policy, and the optimum against all others."""

import functools
import math
from itertools import combinations, count, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import policy_of
from tests.validation.replay.conftest import line, trace_from
from validation.replay import simulation
from validation.replay.simulation import BlockCache, BlockHistory, ReplayPolicy, ReuseRule, replay_policy, simulate
from validation.replay.trace import NONE, BlockKind, trace_of

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
def test_what_counts_as_reused(requests, by_prefix, by_span):
    trace = trace_from(requests, TOKENS)
    assert simulate(trace, SPAN, "lru", 10_000)[0].tolist() == by_span
    assert by_prefix is None or simulate(trace, PREFIX, "lru", 10_000)[0].tolist() == by_prefix


def corpus(requests):
    """A trace of N prompts, each of a header, four documents of a corpus in any order, and its question."""
    random, tokens = np.random.default_rng(3), np.random.default_rng(4).integers(400, 800, 64)
    shares = 1.0 / np.arange(1, 65)
    drawn = [random.choice(64, 4, replace=False, p=shares / shares.sum()) for _ in range(requests)]
    return trace_of(
        line(i, ["header", *map(str, each), f"question {i}"], [300, *map(int, tokens[each]), 60])
        for i, each in enumerate(drawn)
    )


def conversations(requests):
    """A trace of N turns of eight live conversations, each of which ends after 20 turns."""
    random, numbers, live, lines = np.random.default_rng(5), count(1), {}, []
    for index in range(requests):
        while len(live) < 8:
            number = next(numbers)
            live[number] = ["header", f"page {number}"]
        number = int(random.choice(list(live)))
        live[number].append(f"turn {number} {index}")
        lines.append(line(index, live[number], [900, 500, *[300] * (len(live[number]) - 2)]))
        if len(live[number]) == 22:
            del live[number]
    return trace_of(lines)


def test_policies_differ_and_equal_traces_give_equal_outcomes():
    def reused(policy):
        return simulate(corpus(150), SPAN, policy, 12_000)[0].tolist()

    assert reused("adaptive_semantic") == reused("adaptive_semantic")
    assert len({sum(reused(policy)) for policy in ("lru", "lfu", "size_aware", "adaptive_semantic")}) == 4


@pytest.mark.parametrize(("make", "other"), [(conversations, "lru"), (corpus, "lfu")])
def test_the_adaptive_policy_comes_close_to_the_plain_one_that_fits(make, other):
    """Turns of conversations want the least recently used to go, documents of a corpus the least often used."""
    trace = make(400)
    capacity = sum(trace.spans.tokens) // 4
    adaptive, plain = (simulate(trace, SPAN, policy, capacity)[0].sum() for policy in ("adaptive_semantic", other))
    assert adaptive > 0.97 * plain


@pytest.mark.parametrize("policy", list(ReplayPolicy))
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(25, 6), capacity=st.integers(1, 30))
def test_what_holds_after_every_request(policy, as_prefixes, requests, capacity):
    trace = trace_from(requests, SIZES)
    blocks = trace.prefixes if as_prefixes else trace.spans
    now = [0.0]
    cache = BlockCache(blocks, replay_policy(policy, lambda: now[0]), capacity)
    for seconds, request, _ in trace.requests(as_prefixes=as_prefixes):
        now[0] = seconds
        before = {block for block in range(len(blocks.tokens)) if block in cache}
        hits = cache.serve(request, seconds)
        held = {block for block in range(len(blocks.tokens)) if block in cache}
        assert hits == before & set(request)
        assert hits <= held <= before | set(request)  # a request evicts none of its own
        assert cache.used_tokens == sum(blocks.tokens[block] for block in held) <= capacity
        assert all(blocks.parents[block] in held | {NONE} for block in held)
        if sum(blocks.tokens[block] for block in set(request)) <= capacity:
            assert set(request) <= held


def test_what_comes_back_after_it_went_is_a_regret_and_what_no_other_request_has_is_not_held():
    trace = trace_from([["d"], ["e"], ["d"], ["d"]], SIZES)
    cache = lru(trace.spans, 8)
    hits = [len(cache.serve(request, seconds)) for seconds, request, _ in trace.requests(as_prefixes=False)]
    assert (hits, cache.evictions, cache.regrets) == ([0, 0, 0, 1], 2, 1)
    trace = trace_from([["c"], ["c"]], SIZES)
    cache = lru(trace.spans, 8)
    served = [cache.serve([NONE, *request], seconds) for seconds, request, _ in trace.requests(as_prefixes=False)]
    assert served == [frozenset(), frozenset({0})]
    assert cache.serve([], 9.0) == frozenset()
    assert cache.used_tokens == SIZES["c"]


@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(30, 5), places=st.integers(1, 6))
def test_no_policy_hits_more_than_the_optimum_where_blocks_have_one_size(as_prefixes, requests, places):
    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL)
    rule = ReuseRule("rule", as_prefixes)
    best = simulate(trace, rule, simulation.OPTIMUM, 10 * places)[0].sum()
    assert all(simulate(trace, rule, policy.value, 10 * places)[0].sum() <= best for policy in Eviction)


@settings(max_examples=30)
@given(requests=requests_of(6, 3), places=st.integers(1, 3))
def test_the_optimum_hits_as_much_as_any_choice_could(requests, places):
    sets = [frozenset(request) for request in requests]

    @functools.cache
    def best(index, held):
        if index == len(sets):
            return 0
        could = held | sets[index]
        kept = [frozenset(each) for size in range(places + 1) for each in combinations(sorted(could), size)]
        return len(held & sets[index]) + max(best(index + 1, each) for each in kept)

    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL)
    found, _ = simulate(trace, ReuseRule("rule", as_prefixes=False), simulation.OPTIMUM, 10 * places)
    assert found.sum() == 10 * best(0, frozenset())


WHAT = st.sampled_from(["add", "use", "remove", "evict", "wait"])
STEPS = st.lists(st.tuples(WHAT, st.integers(0, 5), st.integers(1, 300), st.sampled_from(BlockKind)), max_size=60)


def score(history, now, factor, seconds):
    """The logarithm, because old blocks have scores too small for a float."""
    weight = simulation.DEFAULT_WEIGHTS[history.kind] * (1 + math.log(1 + history.uses) + 0.25 * history.uses)
    return math.log(factor * weight / seconds) - (now - history.last_seconds) / seconds


class Model:
    """A policy beside the histories that it follows."""

    def __init__(self, name):
        self.now, self.tick = 0.0, 0
        self.policy = replay_policy(name, lambda: self.now)
        self.held = {}

    def run(self, step, number, size, kind):
        donor_id = str(number)
        if step == "wait":
            self.now += size
        elif step == "add" and donor_id not in self.held:
            self.tick += 1
            history = BlockHistory(size, self.tick, block=number, kind=kind, added=self.tick, last_seconds=self.now)
            self.held[donor_id] = history
            self.policy.added(donor_id, history)
        elif step == "use" and donor_id in self.held:
            history = self.held[donor_id]
            self.tick += 1
            history.last_use, history.last_seconds, history.uses = self.tick, self.now, history.uses + 1
            self.policy.used(donor_id)
        elif step in ("remove", "evict") and donor_id in self.held:
            del self.held[donor_id]
            self.policy.removed(donor_id, evicted=step == "evict")


RANKS = {
    ReplayPolicy.FIFO: lambda held: held.added,
    ReplayPolicy.LRU: lambda held: held.last_use,
    ReplayPolicy.LFU: lambda held: (held.uses, held.last_use),
    ReplayPolicy.STATIC_SEMANTIC: lambda held: (simulation.DEFAULT_WEIGHTS[held.kind], held.last_use),
}


@pytest.mark.parametrize("name", list(RANKS))
@given(steps=STEPS)
def test_order_is_that_of_the_definition(name, steps):
    model = Model(name)
    for step in steps:
        model.run(*step)
    assert list(model.policy.candidates()) == sorted(model.held, key=lambda donor: RANKS[name](model.held[donor]))


@given(steps=STEPS)
def test_adaptive_order_is_that_of_the_score(steps):
    model = Model(ReplayPolicy.ADAPTIVE_SEMANTIC)
    for step in steps:
        model.run(*step)
        if step[0] == "wait":
            list(model.policy.candidates())  # every look makes the ranks again
    model.now += 1
    order = [model.held[donor] for donor in model.policy.candidates()]
    use, seconds = model.policy._use, model.policy._seconds
    scores = [score(held, model.now, use.factors[held.kind], seconds[held.kind]) for held in order]
    assert len(scores) == len(model.held)
    assert all(left <= right + 1e-9 * abs(right) for left, right in pairwise(scores))
    assert all(seconds[kind] == pytest.approx(use.seconds(kind), rel=0.11) for kind in BlockKind)


def code(seconds=0.0, uses=0):
    return BlockHistory(1, uses=uses, kind=BlockKind.CODE, last_seconds=seconds)


def test_factors_follow_hits_regrets_and_unused_blocks():
    use = simulation.KindUse()
    expected = simulation.HIT_FACTOR
    for step, factor in (
        (lambda: use.came_back(BlockKind.CODE, 1.0), 1.0),
        (lambda: use.evicted(code(uses=1)), 1.0),
        (lambda: use.evicted(code()), simulation.UNUSED_FACTOR),
        (lambda: use.came(code()), simulation.REGRET_FACTOR),
        (lambda: use.came(code()), 1.0),
    ):
        step()
        expected *= factor
        assert use.factors[BlockKind.CODE] == pytest.approx(expected)
    assert use.factors[BlockKind.TEMPLATE] == 1.0
    for block in range(2000):
        use.came_back(BlockKind.CODE, 1.0)
        use.evicted(BlockHistory(1, block=block))
    assert (use.factors[BlockKind.CODE], use.factors[BlockKind.OTHER]) == (simulation.MOST, simulation.LEAST)


def seconds_after(gaps):
    use = simulation.KindUse()
    for gap in gaps:
        use.came_back(BlockKind.CODE, gap)
    assert use.seconds(BlockKind.TEMPLATE) == simulation.FIRST_SECONDS
    return use.seconds(BlockKind.CODE)


def test_a_regret_says_how_long_a_kind_waits():
    use = simulation.KindUse()
    use.evicted(code(10.0))
    use.came(code(310.0))
    assert use.seconds(BlockKind.CODE) == seconds_after([300.0])


@pytest.mark.parametrize(
    ("gaps", "expected", "tolerance"),
    [
        ([], simulation.FIRST_SECONDS, 0),
        # at random moments the time to the next use is the mean gap, whenever one looks
        *((np.random.default_rng(0).exponential(mean, 20_000), mean, 0.15) for mean in (0.1, 8.0, 3600.0)),
        # nine gaps of a second and one of 91: 91 % of all moments lie in the long one, and wait 45.5 s on average
        ([*[1.0] * 9, 91.0] * 2000, (9 * 1**2 + 91**2) / (2 * 100), 0.02),
        # what was is forgotten
        ([*[1000.0] * 5000, *[2.0] * 20_000], 1.0, 0.01),
        # a clock that stands still never takes it to nothing
        ([0.0] * 100_000, 0.0005, 0.01),
    ],
    ids=["first", "0.1 s", "8 s", "1 h", "long gaps", "forgotten", "no time"],
)
def test_the_time_until_the_next_use_follows_the_gaps_that_were_seen(gaps, expected, tolerance):
    assert seconds_after(gaps) == pytest.approx(expected, rel=tolerance)


@given(st.lists(st.floats(-1e9, 1e9), max_size=50))
def test_no_gap_ends_it(gaps):
    assert 0 < seconds_after(gaps) <= max(simulation.FIRST_SECONDS, *map(abs, gaps), 0.0)
