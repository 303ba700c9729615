"""Catalog, tiers and saver together: budgets hold, leased donors stay, and every byte read is the donor's own.

Of several ranks, a donor is saved where all of them hold it, and lost where one of them has lost it."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry
from kernels.rope import RopeRotation
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import SaveIntent
from semblend_trt.donors.store import DeviceTier, DonorStore, HostKv, HostMemory, HostTier
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError
from semblend_trt.ranks import EngineRanks
from semblend_trt.transfer import staging
from semblend_trt.transfer.save import DonorSaver
from semblend_trt.transfer.staging import HostWriter, Staging
from tests.semblend_trt.held_donors import SaverGate, fill, held_in, held_kv, save, used_blocks, whole

GEOMETRY = KvGeometry(num_layers=2, kv_heads=2, head_dim=4, block_size=4)
ROTATION = RopeRotation((1.0, 0.1), 4)
TOKEN_BYTES = GEOMETRY.bytes_per_token(torch.float32)
CPU = torch.device("cpu")
ARENA_BLOCKS, HOST_TOKENS = 6, 30
SAVE_BLOCKS, TOKENS = 8, 7


def pattern(number, tokens, dtype=torch.float32):
    """KV of its own for each donor: [layers, 2, kv_heads, tokens, head_dim]."""
    return torch.randn(GEOMETRY.shape(tokens), generator=torch.Generator().manual_seed(number)).to(dtype)


def contents(kv, tokens):
    """A copy of the first `tokens` positions."""
    if isinstance(kv, HostKv):
        return whole(kv)[:, :, :, :tokens].clone()
    out = torch.empty(GEOMETRY.shape(tokens))
    kv_move([Move(kv, 0, 0, tokens)], ContiguousKv(out), ROTATION)
    return out


def arena(blocks, *setting):
    return DeviceTier(blocks, GEOMETRY, torch.float32, CPU, *setting)


class Rank:
    """One rank's tiers with their saver, over an engine pool of four requests."""

    def __init__(self, device=True, **parts):
        self.pool = torch.full((4 * SAVE_BLOCKS, GEOMETRY.num_layers, 2, GEOMETRY.row_elements), torch.nan)
        self.store = DonorStore(tier_of(HOST_TOKENS), arena(ARENA_BLOCKS) if device else None)
        writer = HostWriter(ROTATION, Staging(5 * TOKEN_BYTES, 1, GEOMETRY, torch.float32, CPU))
        self.saver = DonorSaver(self.store, self.pool, GEOMETRY, ROTATION, writer, **parts)

    def save(self, slot, donor_id, tier, kv):
        blocks = list(range(slot * SAVE_BLOCKS, (slot + 1) * SAVE_BLOCKS))[::-1]
        kv_move([Move(ContiguousKv(kv), 0, 0, kv.shape[3])], self.saver.source(blocks), ROTATION)
        self.saver.start(SaveIntent(slot, donor_id, kv.shape[3], tier), blocks, kv.shape[3])

    def saved(self, donor_id="donor", tier=Tier.HOST, number=1, tokens=TOKENS):
        """What a save has ended with, on this rank alone unless another one is asked."""
        self.save(0, donor_id, tier, pattern(number, tokens))
        self.saver.drain()
        return self.finished()

    def finished(self):
        ((slot, saved),) = self.saver.finished()
        assert slot == 0
        return saved

    def keep(self, donor_id, tier, number, tokens):
        saved = self.saved(donor_id, tier, number, tokens)
        assert (saved.error, saved.tokens) == (None, tokens)

    def read(self, donor_id, tokens):
        with self.store.reading(donor_id) as kv:
            return contents(kv, tokens)


@pytest.fixture
def rank():
    built = Rank()
    yield built
    built.saver.close()


def assert_all_is_free(rank):
    assert (held_in(rank.store), used_blocks(rank.store.device), rank.store.host.used_bytes) == (set(), 0, 0)


@pytest.mark.parametrize("dropped_from", ["store", "device"])  # the latter: before the copy claimed room on the host
def test_donor_dropped_on_its_way_down_is_in_neither_tier(rank, dropped_from):
    rank.keep("a", Tier.DEVICE, 1, 8)

    def drop(source, tokens, held):
        assert (rank.store if dropped_from == "store" else rank.store.device).drop("a")
        assert used_blocks(rank.store.device) == 2  # still being read
        assert rank.store.host.used_bytes == 8 * TOKEN_BYTES

    assert rank.store.offload("a", drop) is False
    assert_all_is_free(rank)


def test_donor_dropped_on_its_way_up_is_in_neither_tier(rank):
    rank.keep("a", Tier.HOST, 1, 8)
    # The drop looked at the device before the copy claimed blocks there.
    with pytest.raises(DonorUnavailableError, match="dropped while it was being promoted"):
        rank.store.promote("a", lambda held, target: rank.store.host.drop("a"))
    assert_all_is_free(rank)


@pytest.mark.parametrize(("begins", "move"), [(Tier.HOST, "promote"), (Tier.DEVICE, "offload")])
def test_a_donor_that_moves_while_it_is_looked_for_is_found(rank, monkeypatch, begins, move):
    """It is in its new tier before it leaves the old one; the look at the old one comes just too late."""
    rank.keep("a", begins, 1, 8)
    tier = getattr(rank.store, begins.value)
    look = tier.reading

    def too_late(donor_id):
        monkeypatch.undo()
        getattr(rank.saver, move)(donor_id)
        rank.saver.drain()
        return look(donor_id)

    monkeypatch.setattr(tier, "reading", too_late)
    assert torch.equal(rank.read("a", 8), pattern(1, 8))
    with pytest.raises(DonorUnavailableError), rank.store.reading("unknown"):
        pass


def test_blocks_that_are_read_are_given_to_no_other_donor(rank):
    rank.keep("a", Tier.DEVICE, 1, 24)
    with rank.store.reading("a") as kv:
        assert rank.store.drop("a")
        rank.save(1, "b", Tier.DEVICE, pattern(2, 24))
        rank.saver.drain()
        assert torch.equal(contents(kv, 24), pattern(1, 24))
    ((_, refused),) = rank.saver.finished()
    assert str(refused.error).startswith("CapacityError: donor b needs 6 blocks; 0 of 6 are free")
    rank.keep("b", Tier.DEVICE, 2, 24)
    assert torch.equal(rank.read("b", 24), pattern(2, 24))


def test_the_caller_queues_a_save_only_while_nothing_else_is_under_way():
    """Room may still have to be made for it."""
    rank, gate = Rank(at_once=100), threading.Event()
    rank.saver._submit(gate.wait)
    rank.save(0, "behind", Tier.HOST, pattern(1, 8))
    assert rank.store.host.used_bytes == 0
    gate.set()
    rank.saver.drain()
    with SaverGate(rank):
        rank.save(1, "at once", Tier.HOST, pattern(2, 8))
        assert rank.store.host.used_bytes == 2 * 8 * TOKEN_BYTES
        assert "at once" not in rank.store.host  # its bytes have to be waited for
    assert torch.equal(rank.read("behind", 8), pattern(1, 8))
    assert torch.equal(rank.read("at once", 8), pattern(2, 8))
    rank.saver.close()


def test_a_way_down_that_fails_half_way_keeps_its_memory_until_its_copies_have_ended(rank, monkeypatch):
    """A file that is read back could get the memory, and no stream orders what the processor writes."""
    rank.keep("a", Tier.DEVICE, 1, 8)
    taken = []

    def chunks(writer, source, tokens, held):
        yield
        raise MemoryError("no table")

    monkeypatch.setattr(HostWriter, "chunks", chunks)
    monkeypatch.setattr(staging, "finish", lambda stream: taken.append(rank.store.host.used_bytes))
    rank.saver.offload("a")
    rank.saver.drain()
    assert taken == [8 * TOKEN_BYTES]
    assert [saved.error for saved in rank.saver.lost()] == ["MemoryError: no table"]
    assert_all_is_free(rank)


@pytest.mark.parametrize(("name", "free"), [("host", "2304 bytes; 2176 of"), ("device", "5 blocks; 2 of 6")])
def test_what_has_no_room_or_is_not_written_to_its_end_is_not_held(rank, name, free):
    tier = getattr(rank.store, name)
    with tier.writing("a", 13):
        pass
    for donor_id, tokens, error, message in (("b", 18, CapacityError, free), ("a", 1, ValueError, "a is already in")):
        with pytest.raises(error, match=message), tier.writing(donor_id, tokens):
            pass
    with pytest.raises(RuntimeError, match="copy failed"), tier.writing("c", 8):
        raise RuntimeError("copy failed")
    writing = tier.writing("d", 8)
    writing.__enter__()
    for donor_id in "cd":
        assert donor_id not in tier
        with pytest.raises(DonorUnavailableError, match=f"{donor_id} is not in"), tier.reading(donor_id):
            pass
    assert tier.drop("d")
    with pytest.raises(DonorUnavailableError, match="dropped while it was being saved"):
        writing.__exit__(None, None, None)
    assert tier.drop("a")
    assert_all_is_free(rank)


@pytest.fixture
def other():
    """What the other rank tells next: the tokens that it holds of each donor, -1 where it is not done."""
    return SimpleNamespace(tokens=[])


@pytest.fixture
def one_of_two(other):
    def gather(own):
        assert len(own) == len(other.tokens)
        return [own, other.tokens]

    built = Rank(ranks=EngineRanks(0, 2, gather))
    yield built
    built.saver.close()


def test_a_save_has_ended_when_the_slowest_rank_is_done(one_of_two, other):
    one_of_two.save(0, "donor", Tier.HOST, pattern(1, TOKENS))
    one_of_two.saver.drain()
    other.tokens = [-1]
    assert one_of_two.saver.finished() == []
    other.tokens = [TOKENS]
    assert one_of_two.finished().tokens == TOKENS
    other.tokens = []
    assert one_of_two.saver.finished() == []


@pytest.mark.parametrize(("theirs", "error"), [(4, None), (0, "another rank does not hold it")])
def test_a_donor_is_as_long_as_its_shortest_part(one_of_two, other, theirs, error):
    other.tokens = [theirs]
    saved = one_of_two.saved()
    assert (saved.tokens, saved.error) == (theirs, error)
    assert ("donor" in held_in(one_of_two.store)) == bool(theirs)


def test_an_own_failure_is_told_with_its_reason(one_of_two, other):
    one_of_two.store.host._memory.take(HOST_TOKENS)
    other.tokens = [TOKENS]
    assert str(one_of_two.saved().error).startswith("CapacityError: donor donor needs")


def test_a_donor_that_another_rank_lost_on_its_way_down_is_lost(one_of_two, other):
    saver, other.tokens = one_of_two.saver, [TOKENS]
    one_of_two.saved(tier=Tier.DEVICE)
    saver.offload("donor")
    saver.offload("unknown")
    saver.drain()
    other.tokens = [-1, 1]
    assert saver.lost() == []
    other.tokens = [0, 1]
    (lost,) = saver.lost()
    assert (lost.donor_id, lost.tokens, lost.error) == ("donor", 0, "another rank does not hold it")
    assert "donor" not in held_in(one_of_two.store)
    other.tokens = []
    assert saver.lost() == []


@pytest.fixture
def snapshotting():
    """A rank of an engine that does not hold what is saved, with room for two blocks, and without a device tier."""
    built = Rank(device=False, snapshots=arena(2, "SEMBLEND_SNAPSHOT_BYTES"))
    yield built
    built.saver.close()


@pytest.mark.promise("donors", "Blocks that the engine gives to...")
def test_a_donor_is_cut_to_the_room_of_its_snapshot(snapshotting):
    assert snapshotting.saved("long", tokens=11).tokens == 8
    assert torch.equal(snapshotting.read("long", 8), pattern(1, 11)[:, :, :, :8])


def test_without_room_for_a_snapshot_nothing_is_kept(snapshotting):
    with SaverGate(snapshotting):
        for slot, donor_id in enumerate(("first", "second")):
            snapshotting.save(slot, donor_id, Tier.HOST, pattern(slot, TOKENS))
    told = {saved.donor_id: (saved.tokens, saved.error) for _, saved in snapshotting.saver.finished()}
    assert told["first"] == (TOKENS, None)
    assert told["second"][0] == 0
    assert "SEMBLEND_SNAPSHOT_BYTES" in str(told["second"][1])


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_snapshot_is_given_back_however_the_save_ends(snapshotting, tier):
    for _ in range(3):  # there is no device tier: those saves fail
        assert (snapshotting.saved(tier=tier).error is None) == (tier is Tier.HOST)
        snapshotting.store.drop("donor")
        assert snapshotting.saver._snapshots.free_tokens == 8


def tier_of(tokens, dtype=torch.float32):
    return HostTier(tokens * TOKEN_BYTES, GEOMETRY, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_gives_back_what_was_saved_from_memory_of_its_own(dtype):
    tier, wide = tier_of(100, dtype), pattern(0, 20, dtype)
    save(tier, "a", wide[:, :, :, 3:11])
    expected = wide[:, :, :, 3:11].clone()
    wide.fill_(float("nan"))
    held = held_kv(tier, "a").parts[0].tensor
    assert torch.equal(held, expected)
    assert held.dtype == dtype
    assert held.permute(0, 3, 1, 2, 4).is_contiguous()  # any tokens of a layer are one run
    assert tier.used_bytes == expected.numel() * expected.element_size()


@pytest.mark.promise("donors", "Each tier keeps within its byte budget")
@settings(max_examples=80)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8)), max_size=30))
def test_the_budget_holds_through_any_saves_and_drops(steps):
    """Memory that donors leave in any order is used again to the last token."""
    tier, held = tier_of(12), {}
    for number, (donor_id, tokens) in enumerate(steps):
        used = sum(one.shape[3] for one in held.values())
        kv = pattern(number, tokens)
        if not tokens:
            assert tier.drop(donor_id) == (donor_id in held)
            held.pop(donor_id, None)
        elif donor_id in held:
            with pytest.raises(ValueError, match="already in host memory"):
                save(tier, donor_id, kv)
        elif used + tokens > 12:
            told = f"needs {tokens * TOKEN_BYTES} bytes; {(12 - used) * TOKEN_BYTES} of"
            with pytest.raises(CapacityError, match=told):
                save(tier, donor_id, kv)
        else:
            save(tier, donor_id, kv)
            held[donor_id] = kv
        assert {each for each in "abcd" if each in tier} == set(held)
        assert tier.used_bytes == sum(one.shape[3] for one in held.values()) * TOKEN_BYTES
    for donor_id, kv in held.items():
        assert torch.equal(whole(held_kv(tier, donor_id)), kv)
    tier.clear()
    assert tier.used_bytes == 0
    save(tier, "all", pattern(0, 12))
    assert len(held_kv(tier, "all").parts) == 1


def test_memory_of_a_dropped_donor_waits_for_its_reader():
    tier, kv = tier_of(5), pattern(0, 5)
    save(tier, "a", kv)
    with tier.reading("a") as held:
        assert tier.drop("a")
        with pytest.raises(CapacityError):
            save(tier, "b", pattern(1, 1))
        assert torch.equal(whole(held), kv)
    assert tier.used_bytes == 0
    save(tier, "b", pattern(1, 5))
    with pytest.raises(DonorUnavailableError, match="a is not in host memory"), tier.reading("a"):
        pass


def test_nothing_is_written_before_the_reads_that_were_queued_have_ended():
    """A stream that writes waits for them itself; any other writer waits for its stream."""
    tier, waits = tier_of(10), []
    ended, first, second = (Mock(**{"query.return_value": has_ended}) for has_ended in (True, False, False))
    for end in (None, ended, first, second):
        tier.read_until(end)
    with tier.writing("a", 5, Mock(wait_event=waits.append)) as held:
        assert (waits, first.synchronize.called) == ([first, second], False)
        fill(held, pattern(0, 5))
    with tier.writing("b", 5) as held:
        assert first.synchronize.called
        assert second.synchronize.called
        fill(held, pattern(0, 5))
    assert torch.equal(whole(held_kv(tier, "a")), pattern(0, 5))


def test_more_memory_than_there_is_cannot_be_locked():
    with pytest.raises(ConfigurationError, match="lower it"):
        HostMemory(1 << 30, 1 << 30, lock=True)


def test_locked_memory_goes_back_with_its_tier(monkeypatch):
    locked = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or 0, cudaHostUnregister=locked.pop
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory(3, 16, lock=True)
    assert list(locked.values()) == [48]
    del memory
    assert locked == {}
