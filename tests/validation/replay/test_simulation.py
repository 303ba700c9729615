"""What a cache holds, what counts as reused, the order of every policy, and the optimum against all others."""

import functools
import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import policy_of
from tests.validation.replay.conftest import line, trace_from, write_trace
from validation.cli import main
from validation.replay import simulation
from validation.replay.simulation import (
    MARGIN,
    BlockCache,
    BlockHistory,
    Fleet,
    ReplayPolicy,
    ReuseRule,
    replay_policy,
    serve_fleet,
    simulate,
)
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


def test_policies_differ_and_equal_traces_give_equal_outcomes():
    def reused(policy):
        return simulate(corpus(150), SPAN, policy, 12_000)[0].tolist()

    assert reused("lfu") == reused("lfu")
    assert len({sum(reused(policy)) for policy in ("lru", "lfu", "size_aware")}) == 3


@pytest.mark.parametrize("policy", list(ReplayPolicy))
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(25, 6), capacity=st.integers(1, 30))
def test_what_holds_after_every_request(policy, as_prefixes, requests, capacity):
    trace = trace_from(requests, SIZES)
    blocks = trace.prefixes if as_prefixes else trace.spans
    cache = BlockCache(blocks, replay_policy(policy), capacity)
    for _, request, _ in trace.requests(as_prefixes=as_prefixes):
        before = {block for block in range(len(blocks.tokens)) if block in cache}
        hits = cache.serve(request)
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
    hits = [len(cache.serve(request)) for _, request, _ in trace.requests(as_prefixes=False)]
    assert (hits, cache.evictions, cache.regrets) == ([0, 0, 0, 1], 2, 1)
    trace = trace_from([["c"], ["c"]], SIZES)
    cache = lru(trace.spans, 8)
    served = [cache.serve([NONE, *request]) for _, request, _ in trace.requests(as_prefixes=False)]
    assert served == [frozenset(), frozenset({0})]
    assert cache.serve([]) == frozenset()
    assert cache.used_tokens == SIZES["c"]


@pytest.mark.promise("commands", "`python -m validation replay` says which...")
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


WHAT = st.sampled_from(["add", "use", "remove", "evict"])
STEPS = st.lists(st.tuples(WHAT, st.integers(0, 5), st.integers(1, 300), st.sampled_from(BlockKind)), max_size=60)


class Model:
    """A policy beside the histories that it follows."""

    def __init__(self, name):
        self.tick = 0
        self.policy = replay_policy(name)
        self.held = {}

    def run(self, step, number, size, kind):
        donor_id = str(number)
        if step == "add" and donor_id not in self.held:
            self.tick += 1
            history = BlockHistory(size, self.tick, block=number, kind=kind, added=self.tick)
            self.held[donor_id] = history
            self.policy.added(donor_id, history)
        elif step == "use" and donor_id in self.held:
            history = self.held[donor_id]
            self.tick += 1
            history.last_use, history.uses = self.tick, history.uses + 1
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


FLEET = Fleet(2, 2, 1 << 20, 10_000.0, 1_000)
# Bandwidth in Gb/s from which fetching FLEET's tokens takes less time than their prefill.
PAYS = 8e-9 * FLEET.token_bytes * FLEET.tokens_per_s / MARGIN


def busy_holder():
    """The holder of a document gets a long prompt, the other worker a short one, and then the document is asked for."""
    asked = [(0.0, "document", 20_000), (9.0, "short", 10), (9.0, "long", 90_000), (9.0, "document", 20_000)]
    return trace_of(line(i, [name], [n], timestamp_ms=1e3 * at) for i, (at, name, n) in enumerate(asked))


@pytest.mark.parametrize(("gbits", "fetched"), [(0.0, 0), (0.9 * PAYS, 0), (1.1 * PAYS, 19_999)])
def test_a_fetch_pays_from_the_bandwidth_that_its_formula_says(gbits, fetched):
    found = serve_fleet(busy_holder(), PREFIX, FLEET, gbits)
    assert found.fetched.tolist() == [0, 0, 0, fetched]
    assert found.ttft[-1] == pytest.approx(8e-6 * fetched / gbits + 1e-4 if fetched else 2.0 + 1e-3)


@pytest.mark.parametrize("rule", [PREFIX, SPAN], ids=["prefixes", "spans"])
@pytest.mark.parametrize("seed", range(4))
def test_a_fleet_reuses_no_more_than_there_is_and_fetches_no_more_than_it_reuses(rule, seed):
    rng = np.random.default_rng(seed)
    tokens = {str(name): int(rng.integers(1, 3_000)) for name in range(9)}
    trace = trace_from([[*map(str, rng.permutation(9)[: rng.integers(1, 6)])] for _ in range(60)], tokens)
    fleet = Fleet(1, 4, 12_000, 1_000.0, 1_000)
    alone, found = serve_fleet(trace, rule, fleet), serve_fleet(trace, rule, fleet, 100.0)
    assert not alone.fetched.any()
    assert found.fetched.any()
    assert (found.fetched <= found.reused).all()
    assert (found.reused < found.tokens).all()
    # At this bandwidth a fetch takes next to no time, so that nothing is worse with it.
    assert found.ttft.sum() < alone.ttft.sum()


def test_the_command_writes_rows_for_every_bandwidth(tmp_path):
    lines = [line(i, ["a", f"{i % 3}"], [600, 300]) for i in range(40)]
    path = write_trace(tmp_path / "my trace.jsonl", lines)
    given = ["--trace", path, "--policy", "pull", "--gbits", "1", "100", "--output", str(tmp_path)]
    assert main(["replay", *given]) == 0
    rows = {each["name"]: each for each in json.loads((tmp_path / "replay_pull_my_trace.json").read_bytes())}
    kinds = ("gain_points", "ttft_p95_ratio")
    assert {*rows} == {f"replay_pull_{kind}_{gbits}g_my_trace" for kind in kinds for gbits in (1, 100)}
    assert all(row["baseline"].startswith("simulated") for row in rows.values())
