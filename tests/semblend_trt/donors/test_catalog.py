"""The catalog keeps its budgets, drops the least recently used, and never a donor that is read."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from semblend_trt.config import Eviction
from semblend_trt.donors.catalog import CatalogStats, Tier, TierMoves
from semblend_trt.errors import CapacityError, DonorUnavailableError
from tests.semblend_trt.held_donors import catalog_of, keep


@pytest.mark.known_defect(19)
def test_many_times_the_capacity_leaves_the_capacity():
    catalog = catalog_of(max_donors=7)
    for number in range(500):
        keep(catalog, f"donor-{number}", 20)
    assert catalog.stats() == CatalogStats(ready=5, saving=0, leases=0, used_bytes=1000, evicted=495)
    for number in range(500, 510):
        keep(catalog, f"donor-{number}", 1)
    assert len(catalog) == 7


def test_threads_keep_the_budget_and_the_leases():
    catalog = catalog_of(max_donors=6)

    def work(worker):
        rng = np.random.default_rng(worker)
        for number in range(200):
            donor_id = f"{worker}-{number}"
            try:
                catalog.reserve(donor_id, int(rng.integers(1, 40)))
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

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert catalog.stats().leases == 0


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
    for donor_id, tokens in (("turn-1", 30), ("other", 40)):
        keep(catalog, donor_id, tokens)
    catalog.touch("turn-1")
    assert catalog.reserve("turn-2", 30, continues="turn-1") == TierMoves(Tier.HOST)
    catalog.cancel("turn-2")
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


def test_a_lease_that_is_released_twice_ends_once():
    catalog = two_tiers()
    keep(catalog, "a", 20)
    first, _ = catalog.lease("a"), catalog.lease("a")
    for _ in range(2):
        first.release()
    assert catalog.stats().leases == 1
    assert not catalog.drop("a")
