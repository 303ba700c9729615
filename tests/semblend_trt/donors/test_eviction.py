"""Every policy names donors in the order of its definition, worked out here by sorting all of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from semblend_trt.donors.block_kind import DEFAULT_WEIGHTS, BlockKind, main_kind
from semblend_trt.donors.donor_table import Tier, TierMoves
from semblend_trt.donors.eviction import (
    FIRST_SECONDS,
    HIT_FACTOR,
    LEAST,
    MOST,
    REGRET_FACTOR,
    UNUSED_FACTOR,
    DonorHistory,
    Eviction,
    KindWeights,
    ReturnTimes,
    eviction_factory,
)
from semblend_trt.errors import CapacityError
from tests.semblend_trt.held_donors import BYTES_PER_TOKEN, catalog_of, keep

KINDS = st.dictionaries(st.sampled_from(BlockKind), st.integers(1, 9), min_size=1, max_size=3).map(
    lambda shares: {kind: share / sum(shares.values()) for kind, share in shares.items()}
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "describe", "remove", "evict", "wait"]),
        st.integers(0, 5),
        st.integers(1, 300),
        KINDS,
    ),
    max_size=60,
)


def score(history, now, factor, seconds):
    """The logarithm, because old donors have scores too small for a float."""
    weight = factor * sum(share * DEFAULT_WEIGHTS[kind] for kind, share in history.kinds.items())
    uses = 1 + math.log(1 + history.uses) + 0.25 * history.uses
    return math.log(weight * uses / seconds) - (now - history.last_seconds) / seconds


class Model:
    """A policy beside the histories that it is told of."""

    def __init__(self, name):
        self.now, self.tick, self.floor = 0.0, 0, 0.0
        self.policy = eviction_factory(name, lambda: self.now)()
        self.held: dict[str, DonorHistory] = {}
        self.sized: dict[str, float] = {}

    def run(self, step, number, size, kinds):
        donor_id = str(number)
        if step == "wait":
            self.now += size
        elif step == "add" and donor_id not in self.held:
            self.tick += 1
            history = DonorHistory(size, self.tick, self.tick, self.now, kinds=kinds)
            self.held[donor_id], self.sized[donor_id] = history, self.floor + 1 / size
            self.policy.added(donor_id, history)
        elif donor_id in self.held:
            self.change(step, donor_id, kinds)

    def change(self, step, donor_id, kinds):
        history = self.held[donor_id]
        if step == "use":
            self.tick += 1
            history.last_use, history.last_seconds, history.uses = self.tick, self.now, history.uses + 1
            self.sized[donor_id] = self.floor + 1 / history.tokens
            self.policy.used(donor_id)
        elif step == "describe":
            history.kinds = kinds
            self.policy.described(donor_id)
        elif step in ("remove", "evict"):
            if step == "evict":
                self.floor = max(self.floor, self.sized[donor_id])
            del self.held[donor_id], self.sized[donor_id]
            self.policy.removed(donor_id, evicted=step == "evict")


RANKS = {
    Eviction.FIFO: lambda model, donor: model.held[donor].added,
    Eviction.LRU: lambda model, donor: model.held[donor].last_use,
    Eviction.LFU: lambda model, donor: (model.held[donor].uses, model.held[donor].last_use),
    Eviction.SIZE_AWARE: lambda model, donor: (model.sized[donor], model.held[donor].last_use),
    Eviction.STATIC_SEMANTIC: lambda model, donor: (
        sum(share * DEFAULT_WEIGHTS[kind] for kind, share in model.held[donor].kinds.items()),
        model.held[donor].last_use,
    ),
}


@pytest.mark.parametrize("name", list(RANKS))
@given(steps=STEPS)
def test_order_is_that_of_the_definition(name, steps):
    model = Model(name)
    for step in steps:
        model.run(*step)
    assert list(model.policy.candidates()) == sorted(model.held, key=lambda donor: RANKS[name](model, donor))


@given(steps=STEPS)
def test_adaptive_order_is_that_of_the_score(steps):
    model = Model(Eviction.ADAPTIVE_SEMANTIC)
    for step in steps:
        model.run(*step)
        if step[0] == "wait":
            list(model.policy.candidates())  # ranks are made anew at every look
    model.now += 1
    order = list(model.policy.candidates())
    kinds = [main_kind(model.held[donor].kinds) for donor in order]
    weights, seconds = model.policy._weights, model.policy._seconds
    scores = [
        score(model.held[donor], model.now, weights.factor(kind), seconds[kind])
        for donor, kind in zip(order, kinds, strict=True)
    ]
    assert len(scores) == len(model.held)
    assert all(left <= right + 1e-9 * abs(right) for left, right in itertools.pairwise(scores))
    assert all(seconds[kind] == pytest.approx(weights.returns.seconds(kind), rel=0.11) for kind in BlockKind)


@pytest.mark.parametrize(
    ("kind", "uses", "every_seconds", "order"),
    [
        # Turns of a conversation are used every second until it ends; then those of a live one are worth more.
        (BlockKind.ASSISTANT_HISTORY, 3998, 1.0, ["used", "new"]),
        # The same pause says little of a kind whose donors wait long for their next use.
        (BlockKind.RETRIEVED_CONTEXT, 38, 100.0, ["new", "used"]),
    ],
)
def test_uses_keep_a_donor_only_until_it_is_overdue(kind, uses, every_seconds, order):
    """One donor was used so often, the last time 30 s ago; the other one has just come."""
    now = 0.0
    policy = eviction_factory(Eviction.ADAPTIVE_SEMANTIC, lambda: now)()
    kinds = {kind: 1.0}
    used = DonorHistory(100, 1, 1, now, kinds=kinds)
    policy.added("used", used)
    for tick in range(2, uses + 2):
        now += every_seconds
        used.uses, used.last_use, used.last_seconds = used.uses + 1, tick, now
        policy.used("used")
    now += 30.0
    policy.added("new", DonorHistory(100, uses + 2, uses + 2, now, kinds=kinds))
    assert list(policy.candidates()) == order


def evicted_history(kinds, text, uses=0, last_seconds=0.0):
    return DonorHistory(1, last_seconds=last_seconds, uses=uses, text=text, kinds=kinds)


def test_kind_weights_follow_hits_regrets_and_unused_donors():
    weights, code = KindWeights(), {BlockKind.CODE: 1.0}
    weights.hit(code, 1.0)
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR)
    weights.evicted("a", evicted_history(code, b"text", uses=1))
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR)
    weights.came("a", b"text", 2.0)  # only moved
    weights.evicted("a", evicted_history(code, b"text"))
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR * UNUSED_FACTOR)
    weights.came("b", b"text", 3.0)
    weights.came("c", b"text", 4.0)  # a regret counts once
    assert weights.factor(BlockKind.CODE) == pytest.approx(HIT_FACTOR * UNUSED_FACTOR * REGRET_FACTOR)
    assert weights.factor(BlockKind.TEMPLATE) == 1.0


def test_hits_and_regrets_say_how_long_a_kind_waits():
    weights, expected, code = KindWeights(), ReturnTimes(), {BlockKind.CODE: 1.0}
    weights.hit(code, 5.0)
    weights.evicted("a", evicted_history(code, b"text", last_seconds=10.0))
    weights.came("b", b"text", 310.0)
    weights.evicted("b", evicted_history(code, b"text", last_seconds=310.0))
    weights.came("b", b"text", 999.0)  # only moved
    for gap in (5.0, 300.0):
        expected.came_back(BlockKind.CODE, gap)
    assert weights.returns.seconds(BlockKind.CODE) == expected.seconds(BlockKind.CODE)
    assert weights.returns.seconds(BlockKind.TEMPLATE) == FIRST_SECONDS


def test_kind_weights_stay_within_their_bounds():
    weights = KindWeights()
    for _ in range(2000):
        weights.hit({BlockKind.CODE: 1.0}, 1.0)
        weights.evicted("a", evicted_history({BlockKind.OTHER: 1.0}, b""))
    assert (weights.factor(BlockKind.CODE), weights.factor(BlockKind.OTHER)) == (MOST, LEAST)


def catalog_under(name):
    return catalog_of(100, 50, eviction_factory(name, lambda: 0.0))


@pytest.mark.known_defect(20)
@pytest.mark.parametrize(
    ("name", "stays"),
    [(name, name is not Eviction.FIFO) for name in Eviction if name is not Eviction.STATIC_SEMANTIC],
)
def test_hit_then_overflow_keeps_the_hot_donor(name, stays):
    catalog = catalog_under(name)
    for donor_id in "abcd":
        keep(catalog, donor_id, 25)
    for _ in range(3):
        catalog.lease("a").release()
    assert ("a" not in keep(catalog, "e", 25).dropped) == stays


def test_semantic_policies_keep_a_system_prompt_over_a_question():
    for name in (Eviction.STATIC_SEMANTIC, Eviction.ADAPTIVE_SEMANTIC):
        catalog = catalog_under(name)
        for donor_id, kind in (("a", BlockKind.SYSTEM_PROMPT), ("b", BlockKind.USER_QUERY)):
            keep(catalog, donor_id, 50)
            catalog.describe(donor_id, {kind: 1.0})
        assert keep(catalog, "c", 50).dropped == ("b",)


class PolicyMachine(RuleBasedStateMachine):
    """A catalog of three tiers under any policy: budgets hold, leased donors stay, and nothing is lost count of."""

    name = Eviction.LRU

    def __init__(self):
        super().__init__()
        self.now, self.number = 0.0, 0
        self.catalog = catalog_of(
            60, 8, eviction_factory(self.name, lambda: self.now),
            device_blocks=4, block_size=10, disk_bytes=20 * 4096, num_layers=1,
        )  # fmt: skip
        self.catalog.begin_writing()
        self.saving: list[str] = []
        self.writing: set[str] = set()
        self.moving: dict[str, str] = {}
        self.ready: set[str] = set()
        self.leases: list = []

    def obey(self, moves):
        gone = set(moves.dropped)
        leased = {lease.donor_id for lease in self.leases}
        assert not (gone | set(moves.released) | set(moves.offloaded)) & leased
        assert not gone & (self.writing | set(self.moving) | set(self.saving))
        self.ready -= gone
        self.writing |= set(moves.written)

    @rule(size=st.integers(1, 50), text=st.sampled_from([b"", b"x", b"y"]))
    def reserve(self, size, text):
        self.number += 1
        try:
            moves = self.catalog.reserve(str(self.number), size, text)
        except CapacityError:
            return
        self.obey(moves)
        self.saving.append(str(self.number))

    @rule(size=st.integers(1, 50), text=st.sampled_from([b"", b"x", b"y"]))
    def find(self, size, text):
        self.number += 1
        dropped = self.catalog.adopt(str(self.number), size, text)
        if dropped is not None:
            assert set(dropped) <= self.ready - set(self.moving)
            self.obey(TierMoves(Tier.DISK, dropped=dropped))
            self.ready.add(str(self.number))

    @precondition(lambda self: self.saving)
    @rule(kinds=KINDS, is_cancelled=st.booleans())
    def commit(self, kinds, is_cancelled):
        donor_id = self.saving.pop(0)
        if is_cancelled:
            assert self.catalog.cancel(donor_id)
            self.writing.discard(donor_id)
            return
        self.catalog.commit(donor_id, 1)
        self.catalog.describe(donor_id, kinds)
        self.ready.add(donor_id)

    @precondition(lambda self: self.writing - set(self.saving))
    @rule(succeeded=st.booleans())
    def written(self, succeeded):
        donor_id = min(self.writing - set(self.saving))
        self.writing.discard(donor_id)
        self.catalog.written(donor_id, succeeded)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), up=st.sampled_from(["fetch", "promote"]))
    def move_up(self, data, up):
        donor_id = data.draw(st.sampled_from(sorted(self.ready)))
        moves = getattr(self.catalog, up)(donor_id)
        if moves is not None:
            self.moving[donor_id] = up
            self.obey(moves)

    @precondition(lambda self: self.moving)
    @rule(succeeded=st.booleans())
    def moved_up(self, succeeded):
        donor_id, up = self.moving.popitem()
        if up == "promote":
            self.catalog.promoted(donor_id, succeeded)
            assert self.catalog.tier(donor_id) is (Tier.DEVICE if succeeded else Tier.HOST)
            return
        assert self.catalog.fetched(donor_id, succeeded)
        if not succeeded:
            self.ready.discard(donor_id)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def use(self, data):
        donor_id = data.draw(st.sampled_from(sorted(self.ready)))
        if donor_id not in self.catalog.resting():
            self.leases.append(self.catalog.lease(donor_id))

    @rule(seconds=st.integers(1, 200))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def release(self):
        while self.leases:
            self.leases.pop().release()

    @invariant()
    def budgets_hold(self):
        stats = self.catalog.stats()
        assert stats.used_bytes <= 60 * BYTES_PER_TOKEN
        assert stats.device_blocks_used <= 4
        assert stats.disk_bytes_used <= 20 * 4096
        assert len(self.catalog) == len(self.ready) + len(self.saving) <= 8

    @invariant()
    def every_donor_is_where_the_catalog_says(self):
        for donor_id in self.ready:
            fetching = self.moving.get(donor_id) == "fetch"
            assert self.catalog._table.entries[donor_id].state.value == ("fetching" if fetching else "ready")
        for lease in self.leases:
            assert self.catalog.tier(lease.donor_id) in (Tier.HOST, Tier.DEVICE)

    def teardown(self):
        self.release()
        while self.saving:
            self.catalog.cancel(self.saving.pop())
        while self.moving:
            self.moved_up(True)
        for donor_id in sorted(self.writing):
            self.catalog.written(donor_id, True)
        for donor_id in sorted(self.ready):
            assert self.catalog.drop(donor_id)
        stats = self.catalog.stats()
        assert (stats.used_bytes, stats.device_blocks_used, stats.disk_bytes_used, stats.leases) == (0, 0, 0, 0)


def machine_of(policy):
    machine = type(f"Policy_{policy.value}", (PolicyMachine,), {"name": policy})
    machine.TestCase.settings = hypothesis_settings(max_examples=25, stateful_step_count=40)
    return machine.TestCase


TestFifo, TestLru, TestLfu, TestSizeAware, TestStaticSemantic, TestAdaptiveSemantic = map(machine_of, Eviction)


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
