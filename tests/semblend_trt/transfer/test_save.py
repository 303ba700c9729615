"""Of several ranks, a donor is saved where all of them hold it, and lost where one of them has lost it."""

from threading import Event

import pytest
import torch

from kernels.layout import KvGeometry
from kernels.rope import RopeRotation
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import SaveIntent
from semblend_trt.donors.store import DeviceTier, DonorStore, HostTier
from semblend_trt.ranks import EngineRanks
from semblend_trt.transfer.save import DonorSaver
from semblend_trt.transfer.staging import HostWriter
from tests.semblend_trt.held_donors import held_in, held_kv, whole

GEOMETRY = KvGeometry(2, 1, 8, 4)
ROTATION = RopeRotation((1.0, 0.1, 0.01, 0.001), 8)
TOKENS = 7


class OtherRank:
    """What the other rank tells next: the tokens that it holds of each donor, -1 where it is not done."""

    def __init__(self):
        self.tokens = []

    def gather(self, own):
        assert len(own) == len(self.tokens)
        return [own, self.tokens]


@pytest.fixture
def other():
    return OtherRank()


def saver_of(device, **parts):
    store = DonorStore(HostTier(1 << 20, GEOMETRY, torch.float32), device)
    pool = torch.rand(4, 2, 2, GEOMETRY.row_elements)
    return DonorSaver(store, pool, GEOMETRY, ROTATION, HostWriter(ROTATION, None), **parts)


def arena(blocks, *setting):
    return DeviceTier(blocks, GEOMETRY, torch.float32, torch.device("cpu"), *setting)


@pytest.fixture
def saver(other):
    built = saver_of(arena(4), ranks=EngineRanks(0, 2, other.gather))
    yield built
    built.close()


def save(saver, tier=Tier.HOST):
    saver.start(SaveIntent(1, "donor", TOKENS, tier), [2, 0], TOKENS)
    saver.drain()


def finished(saver):
    ((request_id, saved),) = saver.finished()
    assert request_id == 1
    return saved


def test_a_save_has_ended_when_the_slowest_rank_is_done(saver, other):
    save(saver)
    other.tokens = [-1]
    assert saver.finished() == []
    other.tokens = [TOKENS]
    assert finished(saver).tokens == TOKENS
    other.tokens = []
    assert saver.finished() == []


@pytest.mark.parametrize(("theirs", "error"), [(4, None), (0, "another rank does not hold it")])
def test_a_donor_is_as_long_as_its_shortest_part(saver, other, theirs, error):
    save(saver)
    assert "donor" in held_in(saver._store)
    other.tokens = [theirs]
    saved = finished(saver)
    assert (saved.tokens, saved.error) == (theirs, error)
    assert ("donor" in held_in(saver._store)) == bool(theirs)


def test_an_own_failure_is_told_with_its_reason(saver, other):
    saver._store.host._memory.take(saver._store.host._memory.free)
    save(saver)
    other.tokens = [TOKENS]
    assert str(finished(saver).error).startswith("CapacityError: donor donor needs")


def test_a_donor_that_another_rank_lost_on_its_way_down_is_lost(saver, other):
    save(saver, Tier.DEVICE)
    other.tokens = [TOKENS]
    finished(saver)
    saver.offload("donor")
    saver.offload("unknown")
    saver.drain()
    other.tokens = [-1, 1]
    assert saver.lost() == []
    other.tokens = [0, 1]
    (lost,) = saver.lost()
    assert (lost.donor_id, lost.tokens, lost.error) == ("donor", 0, "another rank does not hold it")
    assert "donor" not in held_in(saver._store)
    other.tokens = []
    assert saver.lost() == []


@pytest.fixture
def snapshotting():
    """A saver of an engine that does not hold what is saved, with room for two blocks."""
    built = saver_of(None, snapshots=arena(2, "SEMBLEND_SNAPSHOT_BYTES"))
    yield built
    built.close()


@pytest.mark.promise("donors", "Blocks that the engine gives to...")
def test_a_donor_is_cut_to_the_room_of_its_snapshot(snapshotting):
    snapshotting.start(SaveIntent(1, "long", 11), [2, 0, 1], 11)
    snapshotting.drain()
    assert finished(snapshotting).tokens == 8
    kv = whole(held_kv(snapshotting._store.host, "long"))
    assert torch.equal(kv[:, :, :, 4:], snapshotting._pool[0].view(2, 2, 1, 4, 8))


def test_without_room_for_a_snapshot_nothing_is_kept(snapshotting):
    go_on = Event()
    snapshotting._thread.submit(go_on.wait)
    for request_id, donor_id in ((1, "first"), (2, "second")):
        snapshotting.start(SaveIntent(request_id, donor_id, TOKENS), [2, 0], TOKENS)
    go_on.set()
    snapshotting.drain()
    told = {saved.donor_id: (saved.tokens, saved.error) for _, saved in snapshotting.finished()}
    assert told["first"] == (TOKENS, None)
    assert told["second"][0] == 0
    assert "SEMBLEND_SNAPSHOT_BYTES" in str(told["second"][1])


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_snapshot_is_given_back_however_the_save_ends(snapshotting, tier):
    for _ in range(3):  # there is no device tier: those saves fail
        snapshotting.start(SaveIntent(1, "donor", TOKENS, tier), [2, 0], TOKENS)
        snapshotting.drain()
        finished(snapshotting)
        snapshotting._store.drop("donor")
        assert snapshotting._snapshots.free_tokens == 8
