"""What only a card can show: that streams are ordered. Work that must wait is put behind a kernel that takes long."""

import threading

import pytest
import torch

from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from kernels.rope import RopeRotation
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import SaveIntent
from semblend_trt.donors.store import DeviceTier, DonorStore, HostTier
from semblend_trt.plan import PlanSpan
from semblend_trt.transfer import load as loader_module
from semblend_trt.transfer.load import LayerReadiness, PlanLoader
from semblend_trt.transfer.save import DonorSaver
from semblend_trt.transfer.staging import HostReader, HostWriter, Staging
from tests.semblend_trt.held_donors import held_kv, save, whole
from tests.semblend_trt.plans import plan_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

GEOMETRY = KvGeometry(num_layers=12, kv_heads=4, head_dim=64, block_size=32)
ROTATION = RopeRotation(tuple(10000.0 ** (-plane / 32) for plane in range(32)), 64)
TOKENS, BLOCKS, ARENA = 1000, 128, 40
ROW_BYTES = 2 * 4 * 64 * 2  # one token of one layer, bfloat16
A_WHILE = 200_000_000  # cycles, about a tenth of a second
# Of the 24 chunks in which a donor is saved, each 700 tokens of one layer at most, those that the caller queues.
AT_ONCE = 7


def pinned_tier(size):
    return HostTier(size, GEOMETRY, torch.bfloat16, lock=True)


def random_kv(seed, tokens=TOKENS):
    """[layers, 2, kv_heads, tokens, head_dim] on the host."""
    return torch.randn(12, 2, 4, tokens, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def engine_pool():
    return torch.full((BLOCKS, 12, 2, GEOMETRY.row_elements), torch.nan, dtype=torch.bfloat16, device="cuda")


def staging(slots, tokens=700):
    return Staging(tokens * slots * ROW_BYTES, slots, GEOMETRY, torch.bfloat16, torch.device("cuda"))


def put(pool, block_ids, kv):
    target = PagedKv(pool, torch.tensor(list(block_ids)), GEOMETRY)
    kv_move([Move(ContiguousKv(kv.cuda()), 0, 0, kv.shape[3])], target, ROTATION)


def taken(source, tokens=TOKENS):
    out = torch.empty(12, 2, 4, tokens, 64, dtype=torch.bfloat16, device="cuda")
    kv_move([Move(source, 0, 0, tokens)], ContiguousKv(out), ROTATION)
    return out


class Card:
    """A rank on the card: the arena holds donor "near", the host "far"."""

    def __init__(self, awaited=False, host_tokens=10 * TOKENS):
        self.pool = engine_pool()
        device = self.pool.device
        self.store = DonorStore(
            pinned_tier(host_tokens * 12 * ROW_BYTES), DeviceTier(ARENA, GEOMETRY, torch.bfloat16, device)
        )
        writer = HostWriter(ROTATION, staging(1))
        self.saver = DonorSaver(self.store, self.pool, GEOMETRY, ROTATION, writer, at_once=AT_ONCE)
        self.readiness = LayerReadiness()
        self.readiness.is_awaited = awaited
        reader = HostReader(device, ROTATION, staging(3))
        self.loader = PlanLoader(self.store, self.pool, GEOMETRY, ROTATION, self.readiness, reader)
        self.keep("near", Tier.DEVICE, 1)
        self.keep("far", Tier.HOST, 2)

    def keep(self, donor_id, tier, seed):
        put(self.pool, range(60, 92), random_kv(seed))
        self.saver.start(SaveIntent(0, donor_id, TOKENS, tier), list(range(60, 92)), TOKENS)
        self.saver.drain()
        ((_, saved),) = self.saver.finished()
        assert saved.error is None

    def read(self, donor_id):
        with self.store.reading(donor_id) as kv:
            return taken(kv) if isinstance(kv, PagedKv) else whole(kv).clone()


@pytest.fixture
def card():
    built = Card()
    yield built
    built.saver.close()


def busy():
    """An event that the current stream reaches in a while."""
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    return torch.cuda.current_stream().record_event()


SPANS = (PlanSpan("far", 100, 137, 800), PlanSpan("near", 3, 950, 500), PlanSpan("far", 0, 1500, 77))
PLAN = plan_of(*SPANS, prompt=1600, block_size=32, layers=12, blocks=tuple(range(50)))


def expected_pool(before):
    pool = before.clone()
    donors = {"near": ContiguousKv(random_kv(1).cuda()), "far": ContiguousKv(random_kv(2).cuda())}
    moves = [Move(donors[span.donor_id], span.donor_start, span.target_start, span.length) for span in PLAN.spans]
    kv_move(moves, PagedKv(pool, torch.tensor(PLAN.target_block_ids), GEOMETRY), ROTATION)
    return pool


def assert_equal(pool, expected):
    torch.testing.assert_close(pool, expected, atol=0, rtol=0, equal_nan=True)


def test_a_donor_in_scattered_locked_memory_is_saved_and_loaded_whole():
    half = TOKENS // 2
    card = Card(host_tokens=3 * half)
    expected = expected_pool(card.pool)
    host = card.store.host
    assert whole(held_kv(host, "far")).is_pinned()
    assert host.drop("far")
    for name in ("first", "second", "third"):
        save(host, name, random_kv(5, half))
    assert host.drop("first")
    assert host.drop("third")
    card.keep("far", Tier.HOST, 2)
    assert [part.capacity for part in held_kv(host, "far").parts] == [half, half]
    assert all(part.tensor.is_pinned() for part in held_kv(host, "far").parts)
    card.pool[:50].fill_(float("nan"))
    assert card.loader.load([PLAN]) == []
    torch.cuda.synchronize()
    assert_equal(card.pool[:50], expected[:50])
    assert torch.equal(whole(held_kv(host, "far")), random_kv(2))


def test_memory_of_a_dropped_donor_is_written_only_when_queued_reads_have_run():
    card = Card(host_tokens=TOKENS)
    expected = expected_pool(card.pool)
    torch.cuda._sleep(A_WHILE)
    card.pool[:50].fill_(float("nan"))
    assert card.loader.load([PLAN]) == []
    assert card.store.host.drop("far")
    save(card.store.host, "other", random_kv(7))
    torch.cuda.synchronize()
    assert_equal(card.pool[:50], expected[:50])


@pytest.mark.parametrize("own_stream", [True, False])
def test_what_follows_on_the_stream_sees_the_whole_load(own_stream):
    card = Card()
    expected = expected_pool(card.pool)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # the slots go round more than once, and a load may follow a load
            card.pool[:50].fill_(float("nan"))
            assert card.loader.load([PLAN]) == []
            seen = card.pool.clone()
    stream.synchronize()
    assert_equal(seen, expected)
    card.saver.close()


def test_the_load_waits_for_what_reads_the_blocks_before_it(card):
    card.pool[:50].fill_(1.0)
    torch.cuda._sleep(A_WHILE)
    before = card.pool[:50].clone()
    card.loader.load([PLAN])
    torch.cuda.synchronize()
    assert bool((before == 1.0).all())


def test_a_forward_that_waits_layer_by_layer_sees_each_layer(monkeypatch):
    monkeypatch.setattr(loader_module, "GROUP_BYTES", 1)
    card = Card(awaited=True)
    expected = expected_pool(card.pool)
    stream = torch.cuda.current_stream()
    assert card.loader.load([PLAN]) == []
    assert card.readiness.is_arriving
    seen, arriving = [], []
    for layer in range(12):
        card.readiness.wait(layer, stream)
        arriving.append(card.readiness.is_arriving)
        seen.append(card.pool[:, layer].clone())
    assert (arriving[0], arriving[-1]) == (True, False)  # in several groups of layers
    assert_equal(torch.stack(seen, dim=1), expected)
    card.saver.close()


def test_loading_does_not_wait_for_the_card(card):
    card.loader.load([PLAN])
    behind = busy()
    card.loader.load([PLAN])
    assert not behind.query()
    torch.cuda.synchronize()


def test_a_save_into_memory_that_is_still_read_comes_behind_the_reads_and_its_beginning_waits_for_nothing():
    card = Card(host_tokens=TOKENS)
    expected = expected_pool(card.pool)
    put(card.pool, range(60, 92), random_kv(3))
    behind = busy()
    card.pool[:50].fill_(float("nan"))
    assert card.loader.load([PLAN]) == []
    assert card.store.host.drop("far")
    card.saver.start(SaveIntent(0, "next", TOKENS, Tier.HOST), list(range(60, 92)), TOKENS)
    assert not behind.query()
    card.saver.drain()
    torch.cuda.synchronize()
    assert_equal(card.pool[:50], expected[:50])
    assert torch.equal(card.read("next"), random_kv(3))
    card.saver.close()


def test_blocks_are_written_again_only_behind_the_reads_that_were_queued(card):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), card.store.reading("near") as kv:
        torch.cuda._sleep(A_WHILE)
        seen = taken(kv)
    card.store.drop("near")
    card.keep("next", Tier.DEVICE, 3)  # 32 of 40 blocks: it must take those of "near"
    torch.cuda.synchronize()
    assert torch.equal(seen.cpu(), random_kv(1))
    assert torch.equal(card.read("next").cpu(), random_kv(3))


def test_an_offload_and_the_save_into_its_blocks_keep_their_order(card):
    card.saver.offload("near")
    put(card.pool, range(60, 92), random_kv(3))
    card.saver.start(SaveIntent(0, "next", TOKENS, Tier.DEVICE), list(range(60, 92)), TOKENS)
    card.saver.drain()
    assert torch.equal(whole(held_kv(card.store.host, "near")), random_kv(1))
    assert torch.equal(card.read("next").cpu(), random_kv(3))


def test_a_promotion_comes_behind_the_loads_that_read_the_donor(card):
    """The memory that it leaves on the host is written again only when they have run."""
    expected = expected_pool(card.pool)
    torch.cuda._sleep(A_WHILE)
    card.pool[:50].fill_(float("nan"))
    assert card.loader.load([PLAN]) == []
    card.store.drop("near")
    card.saver.promote("far", torch.cuda.current_stream().record_event())
    card.saver.drain()
    for seed in range(4, 14):  # as many as host memory holds
        save(card.store.host, f"other-{seed}", random_kv(seed))
    torch.cuda.synchronize()
    assert_equal(card.pool[:50], expected[:50])
    assert torch.equal(card.read("far").cpu(), random_kv(2))


def test_a_snapshot_is_read_between_the_forward_that_wrote_and_the_one_that_writes_next():
    """The engine gives the blocks to others at once: its next forward is queued before the saver has begun."""
    pool, kv, blocks = engine_pool(), random_kv(11), range(60, 92)
    store = DonorStore(pinned_tier(10 * TOKENS * 12 * ROW_BYTES), None)
    snapshots = DeviceTier(ARENA, GEOMETRY, torch.bfloat16, pool.device, "SEMBLEND_SNAPSHOT_BYTES")
    writer = HostWriter(ROTATION, staging(1))
    saver = DonorSaver(store, pool, GEOMETRY, ROTATION, writer, at_once=AT_ONCE, snapshots=snapshots)
    go_on = threading.Event()
    saver._thread.submit(go_on.wait)
    torch.cuda._sleep(A_WHILE)
    put(pool, blocks, kv)
    saver.start(SaveIntent(0, "donor", TOKENS, Tier.HOST), list(blocks), TOKENS)
    pool.fill_(torch.nan)
    go_on.set()
    saver.drain()
    ((_, saved),) = saver.finished()
    assert (saved.tokens, saved.error) == (TOKENS, None)
    assert torch.equal(whole(held_kv(store.host, "donor")).cpu(), kv)
    assert snapshots.free_tokens == ARENA * 32
    saver.close()
