"""The catalog keeps its budgets, drops the least recently used, and never a donor somebody reads."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from semblend_trt.donors.catalog import CatalogStats, DonorCatalog, DonorState, Lease
from semblend_trt.donors.donor_table import Placement, Tier
from semblend_trt.donors.eviction import DonorHistory
from semblend_trt.errors import CapacityError, DonorUnavailableError

BYTES_PER_TOKEN = 10


def catalog_with(sizes: dict[str, int], budget_tokens: int = 100, max_donors: int = 10) -> DonorCatalog:
    catalog = DonorCatalog(budget_tokens * BYTES_PER_TOKEN, BYTES_PER_TOKEN, max_donors)
    for donor_id, size in sizes.items():
        assert catalog.reserve(donor_id, "space", size).dropped == ()
        catalog.commit(donor_id, size)
    return catalog


def test_a_donor_is_ready_once_it_is_committed_and_takes_its_real_size() -> None:
    catalog = catalog_with({})
    assert catalog.reserve("a", "space", 60).dropped == ()
    assert catalog.state("a") is DonorState.SAVING
    assert catalog.stats().used_bytes == 600
    with pytest.raises(DonorUnavailableError, match="a is not held"):
        catalog.lease("a")
    catalog.commit("a", 25)
    assert catalog.state("a") is DonorState.READY
    assert catalog.stats() == CatalogStats(1, 0, 0, 250, 1000, 0)


def test_the_least_recently_used_donors_make_room() -> None:
    catalog = catalog_with({"a": 30, "b": 30, "c": 30})
    catalog.touch("a")
    catalog.lease("b").release()
    assert catalog.reserve("d", "space", 40).dropped == ("c",)
    assert catalog.reserve("e", "space", 20).dropped == ("a",)
    assert catalog.state("c") is None
    assert catalog.stats().evicted == 2


def test_the_number_of_donors_is_bounded_too() -> None:
    catalog = catalog_with({"a": 1, "b": 1}, max_donors=2)
    assert catalog.reserve("c", "space", 1).dropped == ("a",)
    assert len(catalog) == 2


@pytest.mark.known_defect(19)
def test_many_times_the_capacity_leaves_the_capacity() -> None:
    catalog = DonorCatalog(100 * BYTES_PER_TOKEN, BYTES_PER_TOKEN, 7)
    for number in range(500):
        catalog.reserve(f"donor-{number}", "space", 20)
        catalog.commit(f"donor-{number}", 20)
    assert catalog.stats() == CatalogStats(5, 0, 0, 1000, 1000, 495)


def test_leased_and_saving_donors_stay_and_a_failed_reservation_changes_nothing() -> None:
    catalog = catalog_with({"a": 30, "b": 30})
    catalog.reserve("saving", "space", 30)
    lease = catalog.lease("a")
    before = catalog.stats()
    with pytest.raises(CapacityError, match="needs 500 bytes of a budget of 1000"):
        catalog.reserve("c", "space", 50)
    assert catalog.stats() == before
    assert catalog.state("b") is DonorState.READY
    assert not catalog.drop("a")
    assert not catalog.drop("saving")
    lease.release()
    assert catalog.reserve("c", "space", 50).dropped == ("b", "a")


def test_what_can_never_fit_evicts_nobody() -> None:
    catalog = catalog_with({"a": 30})
    with pytest.raises(CapacityError, match="SEMBLEND_HOST_BYTES"):
        catalog.reserve("b", "space", 101)
    assert catalog.state("a") is DonorState.READY


def test_a_cancelled_donor_gives_its_room_back() -> None:
    catalog = catalog_with({"ready": 10})
    catalog.reserve("a", "space", 90)
    assert catalog.cancel("a")
    assert not catalog.cancel("a")
    assert not catalog.cancel("ready")
    assert not catalog.cancel("unknown")
    assert catalog.stats().used_bytes == 100


def test_releasing_twice_releases_once() -> None:
    catalog = catalog_with({"a": 10})
    first, second = catalog.lease("a"), catalog.lease("a")
    first.release()
    first.release()
    assert catalog.stats().leases == 1
    assert not catalog.drop("a")
    second.release()
    assert catalog.drop("a")
    second.release()


def test_a_late_release_does_not_touch_a_donor_of_the_same_name() -> None:
    catalog = catalog_with({"a": 10})
    old = catalog.lease("a")
    old.release()
    catalog.drop("a")
    catalog.reserve("a", "space", 10)
    catalog.commit("a", 10)
    new = catalog.lease("a")
    old.release()
    assert catalog.stats().leases == 1
    new.release()


def test_commits_of_donors_that_are_not_saving_are_refused() -> None:
    catalog = catalog_with({"ready": 10})
    for donor_id in ("ready", "unknown"):
        with pytest.raises(DonorUnavailableError, match="not being saved"):
            catalog.commit(donor_id, 5)


def test_bad_reservations_are_refused() -> None:
    catalog = catalog_with({"a": 10})
    with pytest.raises(ValueError, match="already held"):
        catalog.reserve("a", "space", 10)
    catalog.touch("unknown")


def test_another_policy_decides_who_goes() -> None:
    class NewestFirst:
        def __init__(self) -> None:
            self.held: list[str] = []

        def added(self, donor_id: str, history: DonorHistory) -> None:
            self.held.append(donor_id)

        def used(self, donor_id: str) -> None:
            pass

        def described(self, donor_id: str) -> None:
            pass

        def removed(self, donor_id: str, *, evicted: bool = False) -> None:
            if donor_id in self.held:
                self.held.remove(donor_id)

        def candidates(self) -> Iterator[str]:
            return iter(self.held[::-1])

    catalog = DonorCatalog(100, 1, 2, NewestFirst)
    for donor_id in ("a", "b"):
        catalog.reserve(donor_id, "space", 10)
        catalog.commit(donor_id, 10)
    assert catalog.reserve("c", "space", 10).dropped == ("b",)


def test_threads_keep_the_budget_and_the_leases() -> None:
    catalog = DonorCatalog(100 * BYTES_PER_TOKEN, BYTES_PER_TOKEN, 6)
    errors: list[Exception] = []

    def work(worker: int) -> None:
        rng = np.random.default_rng(worker)
        try:
            for number in range(200):
                donor_id = f"{worker}-{number}"
                try:
                    catalog.reserve(donor_id, "space", int(rng.integers(1, 40)))
                except CapacityError:
                    continue
                catalog.commit(donor_id, 1)
                try:
                    lease = catalog.lease(donor_id)
                except DonorUnavailableError:
                    continue  # another thread evicted it between commit and lease
                assert not catalog.drop(donor_id)
                lease.release()
                assert catalog.stats().used_bytes <= 1000
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert catalog.stats().leases == 0


class CatalogMachine(RuleBasedStateMachine):
    """Any order of calls against a plain model of what is held."""

    BUDGET, PLACES = 50, 5
    donors = Bundle("donors")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.catalog = DonorCatalog(self.BUDGET * BYTES_PER_TOKEN + 3, BYTES_PER_TOKEN, self.PLACES)
        self.sizes: dict[str, int] = {}
        self.saving: set[str] = set()
        self.recency: list[str] = []
        self.open: dict[int, Lease] = {}
        self.number = 0

    def leased(self) -> set[str]:
        return {lease.donor_id for lease in self.open.values()}

    def forget(self, donor_id: str) -> None:
        del self.sizes[donor_id]
        self.saving.discard(donor_id)
        if donor_id in self.recency:
            self.recency.remove(donor_id)

    def use(self, donor_id: str) -> None:
        self.recency.remove(donor_id)
        self.recency.append(donor_id)

    @rule(target=donors, size=st.integers(1, 60))
    def reserve(self, size: int) -> object:
        donor_id = f"donor-{self.number}"
        self.number += 1
        going = [donor for donor in self.recency if donor not in self.leased()]
        room, places = self.BUDGET - sum(self.sizes.values()), self.PLACES - len(self.sizes)
        expected = []
        while (room < size or places < 1) and going:
            expected.append(going.pop(0))
            room, places = room + self.sizes[expected[-1]], places + 1
        if room < size or places < 1:
            before = self.catalog.stats()
            with pytest.raises(CapacityError):
                self.catalog.reserve(donor_id, "space", size)
            assert self.catalog.stats() == before
            return multiple()
        assert self.catalog.reserve(donor_id, "space", size).dropped == tuple(expected)
        for dropped in expected:
            self.forget(dropped)
        self.sizes[donor_id] = size
        self.saving.add(donor_id)
        return donor_id

    @rule(donor_id=donors, part=st.floats(0, 1))
    def commit(self, donor_id: str, part: float) -> None:
        if donor_id not in self.saving:
            with pytest.raises(DonorUnavailableError):
                self.catalog.commit(donor_id, 1)
            return
        self.sizes[donor_id] = max(1, int(self.sizes[donor_id] * part))
        self.catalog.commit(donor_id, self.sizes[donor_id])
        self.saving.discard(donor_id)
        self.recency.append(donor_id)

    @rule(donor_id=donors)
    def cancel(self, donor_id: str) -> None:
        saving = donor_id in self.saving
        assert self.catalog.cancel(donor_id) == saving
        if saving:
            self.forget(donor_id)

    @rule(donor_id=donors)
    def drop(self, donor_id: str) -> None:
        droppable = donor_id in self.recency and donor_id not in self.leased()
        assert self.catalog.drop(donor_id) == droppable
        if droppable:
            self.forget(donor_id)

    @rule(donor_id=donors)
    def touch(self, donor_id: str) -> None:
        self.catalog.touch(donor_id)
        if donor_id in self.recency:
            self.use(donor_id)

    @rule(target=leases, donor_id=donors)
    def lease(self, donor_id: str) -> object:
        if donor_id not in self.recency:
            with pytest.raises(DonorUnavailableError):
                self.catalog.lease(donor_id)
            return multiple()
        lease = self.catalog.lease(donor_id)
        self.open[id(lease)] = lease
        self.use(donor_id)
        return lease

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        lease.release()
        self.open.pop(id(lease), None)
        assert lease.released

    @invariant()
    def the_catalog_is_what_the_model_says(self) -> None:
        stats = self.catalog.stats()
        assert stats.used_bytes == sum(self.sizes.values()) * BYTES_PER_TOKEN <= stats.byte_budget
        assert (stats.ready, stats.saving) == (len(self.recency), len(self.saving))
        assert stats.leases == len(self.open)
        assert len(self.catalog) <= self.PLACES
        for donor_id in self.leased():
            assert self.catalog.state(donor_id) is DonorState.READY

    def teardown(self) -> None:
        for lease in list(self.open.values()):
            lease.release()
        assert self.catalog.stats().leases == 0


CatalogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCatalogMachine = CatalogMachine.TestCase


def two_tiers(blocks: int = 4, host_tokens: int = 40, max_donors: int = 10) -> DonorCatalog:
    return DonorCatalog(host_tokens * BYTES_PER_TOKEN, BYTES_PER_TOKEN, max_donors, device_blocks=blocks, block_size=10)


def hold(catalog: DonorCatalog, donor_id: str, size: int) -> Placement:
    placement = catalog.reserve(donor_id, "space", size)
    catalog.commit(donor_id, size)
    return placement


def test_donors_go_to_the_device_while_it_has_room_then_the_oldest_move_down() -> None:
    catalog = two_tiers()
    assert hold(catalog, "a", 20) == Placement(Tier.DEVICE)
    assert hold(catalog, "b", 11) == Placement(Tier.DEVICE)
    catalog.touch("a")
    assert hold(catalog, "c", 15) == Placement(Tier.DEVICE, offloaded=("b",))
    assert [catalog.tier(donor_id) for donor_id in "abc"] == [Tier.DEVICE, Tier.HOST, Tier.DEVICE]
    stats = catalog.stats()
    assert (stats.used_bytes, stats.device_blocks_used, stats.offloaded, stats.evicted) == (110, 4, 1, 0)


def test_the_full_host_drops_its_oldest_for_what_comes_down() -> None:
    catalog = two_tiers(blocks=2, host_tokens=25)
    for donor_id in "abc":
        hold(catalog, donor_id, 12)
    assert hold(catalog, "d", 12) == Placement(Tier.DEVICE, offloaded=("c",), dropped=("a",))
    assert [catalog.tier(donor_id) for donor_id in "abcd"] == [None, Tier.HOST, Tier.HOST, Tier.DEVICE]


def test_the_latest_used_of_the_displaced_has_the_first_claim_on_the_host() -> None:
    catalog = two_tiers(blocks=3, host_tokens=15)
    for donor_id in "abc":
        hold(catalog, donor_id, 10)
    assert hold(catalog, "d", 30) == Placement(Tier.DEVICE, offloaded=("c",), dropped=("b", "a"))


def test_without_a_host_tier_the_displaced_are_dropped() -> None:
    catalog = two_tiers(blocks=2, host_tokens=0)
    hold(catalog, "a", 20)
    assert hold(catalog, "b", 5) == Placement(Tier.DEVICE, dropped=("a",))


def test_leased_and_saving_donors_stay_on_the_device_and_the_new_one_goes_to_the_host() -> None:
    catalog = two_tiers()
    hold(catalog, "a", 20)
    catalog.reserve("saving", "space", 20)
    lease = catalog.lease("a")
    assert hold(catalog, "b", 15) == Placement(Tier.HOST)
    lease.release()
    assert hold(catalog, "c", 20) == Placement(Tier.DEVICE, offloaded=("a",))


def test_what_the_arena_can_never_hold_goes_to_the_host() -> None:
    catalog = two_tiers(blocks=2)
    hold(catalog, "a", 20)
    assert hold(catalog, "b", 21) == Placement(Tier.HOST)
    with pytest.raises(CapacityError, match="5 device blocks of 2"):
        catalog.reserve("c", "space", 41)


def test_a_commit_gives_blocks_back_that_it_does_not_need() -> None:
    catalog = two_tiers()
    catalog.reserve("a", "space", 40)
    catalog.commit("a", 21)
    assert catalog.stats().device_blocks_used == 3
    assert hold(catalog, "b", 10) == Placement(Tier.DEVICE)


def test_places_are_made_from_the_bottom() -> None:
    catalog = two_tiers(blocks=2, max_donors=3)
    for donor_id in "abc":
        hold(catalog, donor_id, 10)
    assert catalog.tier("a") is Tier.HOST
    assert hold(catalog, "d", 10) == Placement(Tier.DEVICE, offloaded=("b",), dropped=("a",))
    catalog.drop("b")
    for donor_id in "cd":
        catalog.lease(donor_id)
    hold(catalog, "e", 5)
    assert hold(catalog, "f", 5) == Placement(Tier.HOST, dropped=("e",))
