"""The catalog keeps its budgets, drops donors in the order of its policy's definition, and never one that is read."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from semblend_trt.config import Eviction, load_settings
from semblend_trt.donors.catalog import CatalogStats, DonorHistory, Tier, TierMoves, policy_of
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError
from tests.semblend_trt.held_donors import BYTES_PER_TOKEN, catalog_of, keep


@pytest.mark.promise("donors", "Each tier keeps within its byte...")
@pytest.mark.known_defect(19)
def test_many_times_the_capacity_leaves_the_capacity():
    catalog = catalog_of(max_donors=7)
    for number in range(500):
        keep(catalog, f"donor-{number}", 20)
    assert catalog.stats() == CatalogStats(ready=5, saving=0, leases=0, host_bytes=1000, evicted=495)
    for number in range(500, 510):
        keep(catalog, f"donor-{number}", 1)
    assert len(catalog) == 7


def two_tiers(blocks=4, host_tokens=40, max_donors=10):
    return catalog_of(host_tokens, max_donors, device_blocks=blocks, block_size=10)


@pytest.mark.parametrize(
    ("limits", "held", "new", "moves"),
    [
        # the full host drops its oldest for what comes down
        ((2, 25), [12, 12, 12], 12, TierMoves(Tier.DEVICE, offloaded=("c",), dropped=("a",))),
        # of the displaced, the one used last has the first claim on the host
        ((3, 15), [10, 10, 10], 30, TierMoves(Tier.DEVICE, offloaded=("c",), dropped=("b", "a"))),
        # without a host tier the displaced are dropped
        ((2, 0), [20], 5, TierMoves(Tier.DEVICE, dropped=("a",))),
        # what the arena can never hold goes to the host
        ((2, 40), [20], 21, TierMoves(Tier.HOST)),
    ],
)
def test_displaced_donors_move_down_or_go(limits, held, new, moves):
    catalog = two_tiers(*limits)
    for donor_id, tokens in zip("abc", held, strict=False):
        keep(catalog, donor_id, tokens)
    assert keep(catalog, "new", new) == moves


def test_leased_and_saving_donors_stay_on_the_device_and_the_new_one_goes_to_the_host():
    catalog = two_tiers()
    keep(catalog, "a", 20)
    catalog.reserve("saving", 20)
    lease = catalog.lease("a")
    assert keep(catalog, "b", 15) == TierMoves(Tier.HOST)
    assert not catalog.cancel("b")  # it is held
    lease.release()
    assert keep(catalog, "c", 20) == TierMoves(Tier.DEVICE, offloaded=("a",))
    with pytest.raises(CapacityError, match="5 device blocks of 4"):
        catalog.reserve("d", 41)


def test_places_are_made_from_the_bottom():
    catalog = two_tiers(blocks=2, max_donors=3)
    for donor_id in "abc":
        keep(catalog, donor_id, 10)
    assert catalog.tier("a") is Tier.HOST
    assert keep(catalog, "d", 10) == TierMoves(Tier.DEVICE, offloaded=("b",), dropped=("a",))
    catalog.drop("b")
    for donor_id in "cd":
        catalog.lease(donor_id)
    keep(catalog, "e", 5)
    assert keep(catalog, "f", 5) == TierMoves(Tier.HOST, dropped=("e",))


def test_what_a_donor_continues_makes_room_before_others_and_counts_as_no_eviction():
    catalog = catalog_of(host_tokens=100)
    for donor_id, tokens in (("other", 40), ("turn-1", 30)):
        keep(catalog, donor_id, tokens)
    assert catalog.reserve("turn-2", 50, continues="turn-1") == TierMoves(Tier.HOST, dropped=("turn-1",))
    assert catalog.stats().evicted == 0
    catalog.commit("turn-2", 50)
    lease = catalog.lease("turn-2")
    assert catalog.reserve("turn-3", 50, continues="turn-2").dropped == ("other",)
    assert catalog.stats().evicted == 1
    lease.release()
    with pytest.raises(CapacityError):
        catalog.reserve("turn-4", 51, continues="turn-2")
    assert catalog.tier("turn-2") is Tier.HOST


def test_a_donor_is_as_often_used_as_the_one_that_it_continues():
    catalog = catalog_of(host_tokens=100, eviction=Eviction.LFU)
    for donor_id in ("turn-1", "other"):
        keep(catalog, donor_id, 30)
    catalog.touch("turn-1")
    catalog.reserve("turn-2", 40, continues="turn-1")
    catalog.commit("turn-2", 40)
    catalog.drop("turn-1")
    assert catalog.reserve("new", 40).dropped == ("other",)


@pytest.mark.promise("donors", "`SEMBLEND_EVICTION` chooses which donors go first")
@pytest.mark.parametrize(
    ("name", "order"),
    # By size "middle" has 1 / 40, "long" 1 / 10 + 1 / 50 and "short" 1 / 10 + 1 / 20: a donor of 10 tokens was evicted.
    [
        (Eviction.LRU, "middle short long"),
        (Eviction.LFU, "short middle long"),
        (Eviction.SIZE_AWARE, "middle long short"),
    ],
)
def test_order_is_that_of_the_definition(name, order):
    policy, held = policy_of(name), {"tiny": 10, "middle": 40, "long": 50, "short": 20}
    for tick, (donor_id, uses) in enumerate([("tiny", 0), ("middle", 0), ("long", 0), ("middle", 1)]):
        policy.used(donor_id, DonorHistory(held[donor_id], tick, uses))
    policy.removed("tiny", evicted=True)
    policy.removed("unknown", evicted=True)
    for tick, (donor_id, uses) in enumerate([("short", 0), ("long", 2)], 4):
        policy.used(donor_id, DonorHistory(held[donor_id], tick, uses))
    assert list(policy.candidates()) == order.split()


@pytest.mark.promise("donors", "`SEMBLEND_EVICTION` chooses which donors go...")
@pytest.mark.parametrize("name", ["fifo", "static_semantic", "adaptive_semantic"])
def test_a_policy_that_only_a_replay_plays_is_refused_with_those_that_serve(monkeypatch, name):
    monkeypatch.setenv("SEMBLEND_EVICTION", name)
    used = "use one of lru, lfu, size_aware; `python -m validation replay` plays the others"
    with pytest.raises(ConfigurationError, match=f"SEMBLEND_EVICTION: policy '{name}' evicts no donors; {used}"):
        load_settings()


@pytest.mark.known_defect(20)
@pytest.mark.parametrize("name", list(Eviction))
def test_hit_then_overflow_keeps_the_hot_donor(name):
    catalog = catalog_of(100, 50, name)
    for donor_id in "abcd":
        keep(catalog, donor_id, 25)
    for _ in range(3):
        catalog.lease("a").release()
    assert "a" not in keep(catalog, "e", 25).dropped


class PolicyMachine(RuleBasedStateMachine):
    """A catalog of three tiers under any policy: budgets hold, leased donors stay, and nothing is lost count of."""

    @initialize(policy=st.sampled_from(Eviction))
    def start(self, policy):
        self.number, self.saving, self.writing, self.moving, self.ready, self.leases = 0, [], set(), {}, set(), []
        self.catalog = catalog_of(60, 8, policy, device_blocks=4, block_size=10, disk_bytes=20 * 4096)
        self.catalog.begin_writing()

    def obey(self, moves):
        gone = set(moves.dropped)
        leased = {lease.donor_id for lease in self.leases}
        assert not (gone | set(moves.released) | set(moves.offloaded)) & leased
        assert not gone & (self.writing | set(self.moving) | set(self.saving))
        self.ready -= gone
        self.writing |= set(moves.written)

    @rule(size=st.integers(1, 50))
    def reserve(self, size):
        self.number += 1
        with suppress(CapacityError):
            self.obey(self.catalog.reserve(str(self.number), size))
            self.saving.append(str(self.number))

    @rule(size=st.integers(1, 50))
    def find(self, size):
        self.number += 1
        dropped = self.catalog.adopt(str(self.number), size)
        if dropped is not None:
            assert set(dropped) <= self.ready - set(self.moving)
            self.obey(TierMoves(Tier.DISK, dropped=dropped))
            self.ready.add(str(self.number))

    @precondition(lambda self: self.saving)
    @rule(is_cancelled=st.booleans())
    def commit(self, is_cancelled):
        donor_id = self.saving.pop(0)
        if is_cancelled:
            assert self.catalog.cancel(donor_id)
            self.writing.discard(donor_id)
        else:
            self.catalog.commit(donor_id, 1)
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
        else:
            assert self.catalog.fetched(donor_id, succeeded)
            self.ready -= set() if succeeded else {donor_id}

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def use(self, data):
        donor_id = data.draw(st.sampled_from(sorted(self.ready)))
        if donor_id not in self.catalog.resting():
            self.leases.append(self.catalog.lease(donor_id))

    @rule()
    def release(self):
        while self.leases:
            self.leases.pop().release()

    @invariant()
    def budgets_hold(self):
        stats = self.catalog.stats()
        assert stats.host_bytes <= 60 * BYTES_PER_TOKEN
        assert stats.device_bytes <= 40 * BYTES_PER_TOKEN
        assert stats.disk_bytes <= 20 * 4096
        assert len(self.catalog) == len(self.ready) + len(self.saving) <= 8
        assert all(self.catalog.tier(lease.donor_id) in (Tier.HOST, Tier.DEVICE) for lease in self.leases)

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
        assert (stats.host_bytes, stats.device_bytes, stats.disk_bytes, stats.leases) == (0, 0, 0, 0)


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = hypothesis_settings(max_examples=75, stateful_step_count=40)


def test_a_lease_that_is_released_twice_ends_once():
    catalog = two_tiers()
    keep(catalog, "a", 20)
    first, _ = catalog.lease("a"), catalog.lease("a")
    for _ in range(2):
        first.release()
    assert catalog.stats().leases == 1
    assert not catalog.drop("a")


def test_threads_keep_the_budget_and_the_leases():
    catalog = catalog_of(max_donors=6)

    def work(worker):
        rng = np.random.default_rng(worker)
        for number in range(200):
            donor_id = f"{worker}-{number}"
            with suppress(CapacityError, DonorUnavailableError):  # another thread may evict it between commit and lease
                catalog.reserve(donor_id, int(rng.integers(1, 40)))
                catalog.commit(donor_id, 1)
                lease = catalog.lease(donor_id)
                assert not catalog.drop(donor_id)
                lease.release()
            assert catalog.stats().host_bytes <= 1000

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert catalog.stats().leases == 0
