"""Every policy of a replay names blocks in the order of its definition, worked out here by sorting all of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet.telemetry import BlockKind
from validation.replay.policies import (
    DEFAULT_WEIGHTS,
    FIRST_SECONDS,
    HIT_FACTOR,
    LEAST,
    MOST,
    REGRET_FACTOR,
    UNUSED_FACTOR,
    AdaptiveSemanticEviction,
    BlockHistory,
    KindWeights,
    ReplayPolicy,
    ReturnTimes,
    replay_policy,
)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "remove", "evict", "wait"]),
        st.integers(0, 5),
        st.integers(1, 300),
        st.sampled_from(BlockKind),
    ),
    max_size=60,
)


def score(history, now, factor, seconds):
    """The logarithm, because old blocks have scores too small for a float."""
    uses = 1 + math.log(1 + history.uses) + 0.25 * history.uses
    return math.log(factor * DEFAULT_WEIGHTS[history.kind] * uses / seconds) - (now - history.last_seconds) / seconds


class Model:
    """A policy beside the histories that it follows."""

    def __init__(self, name):
        self.now, self.tick = 0.0, 0
        self.policy = replay_policy(name, lambda: self.now)
        self.held: dict[str, BlockHistory] = {}

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
    ReplayPolicy.STATIC_SEMANTIC: lambda held: (DEFAULT_WEIGHTS[held.kind], held.last_use),
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
    weights, seconds = model.policy._weights, model.policy._seconds
    scores = [score(held, model.now, weights.factor(held.kind), seconds[held.kind]) for held in order]
    assert len(scores) == len(model.held)
    assert all(left <= right + 1e-9 * abs(right) for left, right in itertools.pairwise(scores))
    assert all(seconds[kind] == pytest.approx(weights.returns.seconds(kind), rel=0.11) for kind in BlockKind)


@pytest.mark.parametrize(
    ("kind", "uses", "every_seconds", "order"),
    [
        # Turns of a conversation are used every second until it ends; then those of a live one are worth more.
        (BlockKind.ASSISTANT_HISTORY, 3998, 1.0, ["used", "new"]),
        # The same pause says little of a kind whose blocks wait long for their next use.
        (BlockKind.RETRIEVED_CONTEXT, 38, 100.0, ["new", "used"]),
    ],
)
def test_uses_keep_a_block_only_until_it_is_overdue(kind, uses, every_seconds, order):
    """One block was used so often, the last time 30 s ago; the other one has just come."""
    now = 0.0
    policy = AdaptiveSemanticEviction(lambda: now)
    used = BlockHistory(100, 1, kind=kind)
    policy.added("used", used)
    for tick in range(2, uses + 2):
        now += every_seconds
        used.uses, used.last_use, used.last_seconds = used.uses + 1, tick, now
        policy.used("used")
    now += 30.0
    policy.added("new", BlockHistory(100, uses + 2, block=1, kind=kind, last_seconds=now))
    assert list(policy.candidates()) == order


def code(seconds=0.0, uses=0):
    return BlockHistory(1, uses=uses, kind=BlockKind.CODE, last_seconds=seconds)


def test_kind_weights_follow_hits_regrets_and_unused_blocks():
    weights = KindWeights()
    weights.hit(BlockKind.CODE, 1.0)
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR)
    weights.evicted(code(uses=1))
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR)
    weights.evicted(code())
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR * UNUSED_FACTOR)
    weights.came(code(3.0))
    weights.came(code(4.0))  # a regret counts once
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR * UNUSED_FACTOR * REGRET_FACTOR)
    assert weights.factor(BlockKind.TEMPLATE) == 1.0


def test_hits_and_regrets_say_how_long_a_kind_waits():
    weights, expected = KindWeights(), ReturnTimes()
    weights.hit(BlockKind.CODE, 5.0)
    weights.evicted(code(10.0))
    weights.came(code(310.0))
    for gap in (5.0, 300.0):
        expected.came_back(BlockKind.CODE, gap)
    assert weights.returns.seconds(BlockKind.CODE) == expected.seconds(BlockKind.CODE)
    assert weights.returns.seconds(BlockKind.TEMPLATE) == FIRST_SECONDS


def test_kind_weights_stay_within_their_bounds():
    weights = KindWeights()
    for block in range(2000):
        weights.hit(BlockKind.CODE, 1.0)
        weights.evicted(BlockHistory(1, block=block))
    assert (weights.factor(BlockKind.CODE), weights.factor(BlockKind.OTHER)) == (MOST, LEAST)


@pytest.mark.parametrize("name", [ReplayPolicy.STATIC_SEMANTIC, ReplayPolicy.ADAPTIVE_SEMANTIC])
def test_semantic_policies_keep_a_system_prompt_over_a_question(name):
    policy = replay_policy(name, lambda: 0.0)
    policy.added("a", BlockHistory(50, 1, block=1, kind=BlockKind.SYSTEM_PROMPT))
    policy.added("b", BlockHistory(50, 2, block=2, kind=BlockKind.USER_QUERY))
    assert list(policy.candidates()) == ["b", "a"]


def seconds_after(gaps):
    times = ReturnTimes()
    for gap in gaps:
        times.came_back(BlockKind.CODE, gap)
    assert times.seconds(BlockKind.TEMPLATE) == FIRST_SECONDS
    return times.seconds(BlockKind.CODE)


def exponential_gaps(mean):
    generator = random.Random(0)
    return [generator.expovariate(1 / mean) for _ in range(20_000)]


@pytest.mark.parametrize(
    ("gaps", "expected", "tolerance"),
    [
        ([], FIRST_SECONDS, 0),
        # at random moments the time to the next use is the mean gap, whenever one looks
        *((exponential_gaps(mean), mean, 0.15) for mean in (0.1, 8.0, 3600.0)),
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
    """Clocks may stand still, or jump."""
    assert 0 < seconds_after(gaps) <= max(FIRST_SECONDS, *map(abs, gaps), 0.0)
