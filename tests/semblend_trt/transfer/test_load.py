"""Spans land at their positions, rotated, from either tier; nothing else is written, and a bad plan harms no other.

For every size of slots, staged copies place and fetch what one plain move would."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from engine_wrapper.sparse_forward import latent_rows
from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv, pool_view
from kernels.rope import RopeRotation, rotate_keys
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.donors.store import DeviceTier, DonorStore, HostKv, HostTier
from semblend_trt.errors import ConfigurationError, DonorUnavailableError, PlanError
from semblend_trt.plan import PlanKind, PlanSpan
from semblend_trt.transfer import load as loader_module
from semblend_trt.transfer.load import LayerReadiness, PlanLoader
from semblend_trt.transfer.staging import HostReader, HostWriter, Staging
from tests.random_models import FAMILIES, save_tiny_model
from tests.semblend_trt.held_donors import held_kv, save, used_blocks, whole
from tests.semblend_trt.plans import plan_of

GEOMETRY = KvGeometry(num_layers=5, kv_heads=2, head_dim=8, block_size=4)
ROTATION = RopeRotation((1.0, 0.1, 0.01, 0.001), 8)
CPU = torch.device("cpu")
BLOCKS = (7, 2, 9, 0, 4, 6)
ROW_BYTES = 2 * 2 * 8 * 4  # one token of one layer, float32
READERS = {"in one call": lambda: None, "staged": lambda: HostReader(CPU, ROTATION, staging(7))}


def staging(tokens, slots=2, device=CPU):
    return Staging(tokens * slots * ROW_BYTES, slots, GEOMETRY, torch.float32, device)


def kv(tokens, seed):
    return torch.randn(5, 2, 2, tokens, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def store():
    """Donor "near" lies in the arena, "far" in host memory."""
    built = DonorStore(HostTier(1 << 20, GEOMETRY, torch.float32), DeviceTier(6, GEOMETRY, torch.float32, CPU))
    with built.device.writing("near", 13) as target:
        kv_move([Move(ContiguousKv(kv(13, 1)), 0, 0, 13)], target, ROTATION)
    save(built.host, "far", kv(15, 2))
    return built


def plan(*spans, blocks=BLOCKS, **fields):
    return plan_of(*spans, **{"block_size": 4, "blocks": blocks, **fields})


MIXED = plan(PlanSpan("near", 2, 0, 9), PlanSpan("far", 1, 9, 12), PlanSpan("near", 0, 22, 1))


def empty_pool():
    return torch.full((20, 5, 2, GEOMETRY.row_elements), math.nan)


def position_in(pool, position):
    """The KV of one position of BLOCKS, [layers, 2, kv_heads, head_dim]."""
    return pool_view(pool, GEOMETRY)[BLOCKS[position // 4], :, :, :, position % 4]


def loader(store, pool, reader=None, readiness=None):
    return PlanLoader(store, pool, GEOMETRY, ROTATION, readiness or LayerReadiness(), reader)


def test_spans_of_two_donors_are_placed_and_the_rest_stays_untouched(store):
    donors, pool = {"near": kv(13, 1), "far": kv(15, 2)}, empty_pool()
    spans = [PlanSpan("near", 6, 3, 5), PlanSpan("far", 1, 9, 8), PlanSpan("near", 0, 18, 3)]
    assert loader(store, pool).load([plan(*spans, computed=2)]) == []
    placed = {position for span in spans for position in range(span.target_start, span.target_end)}
    for position in range(24):
        assert bool(position_in(pool, position).isnan().all()) == (position not in placed)
    others = [block for block in range(20) if block not in BLOCKS]
    assert bool(pool[others].isnan().all())
    for span in spans:
        for offset in range(span.length):
            donor = donors[span.donor_id][:, :, :, span.donor_start + offset]
            placed_kv = position_in(pool, span.target_start + offset)
            torch.testing.assert_close(placed_kv[:, 0], rotate_keys(donor[:, 0], span.shift, ROTATION))
            assert torch.equal(placed_kv[:, 1], donor[:, 1])


@pytest.mark.parametrize("reader", READERS)
def test_a_donor_in_parts_is_placed_like_one_in_one_part(store, reader):
    host = HostTier(20 * 5 * ROW_BYTES, GEOMETRY, torch.float32)
    for donor_id in "abcd":
        save(host, donor_id, kv(5, 3))
    assert all(host.drop(donor_id) for donor_id in "acd")
    save(host, "far", kv(15, 2))
    assert [part.capacity for part in held_kv(host, "far").parts] == [10, 5]
    alone, scattered = empty_pool(), empty_pool()
    far = plan(PlanSpan("far", 1, 9, 12), PlanSpan("far", 8, 21, 2))
    for pool, tier in ((alone, store.host), (scattered, host)):
        assert loader(DonorStore(tier, None), pool, READERS[reader]()).load([far]) == []
    torch.testing.assert_close(scattered, alone, atol=0, rtol=0, equal_nan=True)
    assert not alone.isnan().all()


@pytest.mark.parametrize("reader", READERS)
def test_a_plan_that_cannot_be_loaded_harms_no_other(store, reader):
    pool, alone = empty_pool(), empty_pool()
    missing = plan(PlanSpan("far", 0, 0, 4), PlanSpan("gone", 0, 4, 4), request_id=2, blocks=(10, 11))
    outside = plan(PlanSpan("far", 0, 0, 4), request_id=3, blocks=(20,))
    homeless = plan(PlanSpan("far", 0, 0, 4), request_id=4, blocks=None)
    longer = plan(PlanSpan("far", 12, 0, 4), request_id=5, blocks=(12,))
    failed = loader(store, pool, READERS[reader]()).load([missing, MIXED, outside, homeless, longer])
    errors = [DonorUnavailableError, ValueError, PlanError, DonorUnavailableError]
    assert [(plan.request_id, type(error)) for plan, error in failed] == [*zip((2, 3, 4, 5), errors, strict=True)]
    loader(store, alone).load([MIXED])
    torch.testing.assert_close(pool, alone, atol=0, rtol=0, equal_nan=True)


@pytest.mark.promise("donors", "A span that its donor or the prompt does not hold is not loaded")
@pytest.mark.parametrize("donor", ["near", "far"])
@pytest.mark.parametrize(
    "wrong", [{"donor_start": -1}, {"donor_start": -4}, {"length": -2}, {"length": 99}, {"target_start": -1}], ids=str
)
@pytest.mark.parametrize("reader", READERS)
def test_a_forged_span_is_not_loaded(store, reader, wrong, donor):
    """What another rank has pickled reaches no constructor that would refuse it."""
    pool, untouched = empty_pool(), empty_pool()
    bad = plan(PlanSpan(donor, 0, 0, 4), blocks=(10, 11))
    for name, value in wrong.items():
        object.__setattr__(bad.spans[0], name, value)
    assert [plan for plan, _ in loader(store, pool, READERS[reader]()).load([bad])] == [bad]
    torch.testing.assert_close(pool, untouched, atol=0, rtol=0, equal_nan=True)


def test_plans_that_place_nothing_need_no_blocks(store):
    pool = empty_pool()
    nothing = replace(plan(), matched_tokens=3, target_block_ids=None)
    found = replace(plan(PlanSpan("gone", 0, 4, 4), blocks=None), kind=PlanKind.DISCOVERY_ONLY, matched_tokens=0)
    assert loader(store, pool).load([nothing, found]) == []
    assert bool(pool.isnan().all())


def test_donors_are_let_go_when_the_load_is_queued(store):
    loader(store, empty_pool()).load([MIXED])
    assert store.drop("near")
    assert used_blocks(store.device) == 0


def test_an_error_half_way_fails_every_plan_of_the_call(store, monkeypatch):
    reader, fails = READERS["staged"](), Mock(side_effect=RuntimeError("injected"))
    monkeypatch.setattr(reader, "placing", lambda *_: fails)
    other = plan(PlanSpan("near", 0, 0, 4), request_id=5, blocks=(12,))
    failed = loader(store, empty_pool(), reader).load([MIXED, other])
    assert [plan.request_id for plan, _ in failed] == [1, 5]
    assert fails.call_count == 1
    assert store.drop("near")
    assert used_blocks(store.device) == 0


@pytest.fixture
def awaited(store, monkeypatch):
    """A load from the host whose layers a forward waits for: the pool, its readiness, and the groups placed so far."""
    monkeypatch.setattr(loader_module, "GROUP_BYTES", 1)
    monkeypatch.setattr(loader_module, "GROUPS_AHEAD", 1)
    pool, placed, readiness = empty_pool(), [], LayerReadiness()
    readiness.is_awaited = True
    reader = HostReader(CPU, ROTATION, staging(12))
    placing = reader.placing

    def recorded(*arguments):
        place = placing(*arguments)
        return lambda first, end: placed.append((first, end)) or place(first, end)

    monkeypatch.setattr(reader, "placing", recorded)
    assert loader(store, pool, reader, readiness).load([MIXED]) == []
    return pool, readiness, placed


def test_layers_are_placed_while_the_forward_runs(store, awaited):
    pool, readiness, placed = awaited
    expected = empty_pool()
    loader(store, expected).load([MIXED])
    assert placed == [(0, 1)]
    for layer in range(5):
        readiness.wait(layer, None)
        assert placed[-1] == (min(layer + 1, 4), min(layer + 2, 5))
        torch.testing.assert_close(pool[:, layer], expected[:, layer], atol=0, rtol=0, equal_nan=True)
    assert not readiness.is_arriving


@pytest.mark.parametrize("end", [LayerReadiness.join, LayerReadiness.abandon])
def test_a_donor_on_the_host_is_let_go_behind_its_last_layer(store, awaited, end):
    _, readiness, placed = awaited
    used = store.host.used_bytes
    assert store.drop("far")
    assert store.host.used_bytes == used
    end(readiness, None)
    assert store.host.used_bytes == 0
    assert len(placed) == (5 if end is LayerReadiness.join else 1)


def test_leftovers_of_the_load_before_are_joined_first(store):
    readiness = LayerReadiness()
    readiness.expect((end, None) for end in (2, 3))
    loader(store, empty_pool(), None, readiness).load([])
    assert not readiness.is_arriving


DEVICES = [CPU] + [torch.device("cuda")] * torch.cuda.is_available()
MOVES = ((0, 3, 9, 11), (1, 0, 21, 5), (0, 13, 40, 1), (1, 9, 27, 4))  # donor, its start, the target's, length


def host_donor(tokens, seed, device=CPU):
    """A donor in host memory that `device` may read."""
    memory = torch.randn(5, tokens, 2, 2, 8, generator=torch.Generator().manual_seed(seed))
    return ContiguousKv((memory if device.type == "cpu" else memory.pin_memory()).permute(0, 2, 3, 1, 4))


def empty_target(device=CPU):
    return PagedKv(empty_pool().to(device), torch.tensor([7, 2, 9, 0, 4, 6, 13, 1, 19, 3, 11]), GEOMETRY)


@settings(max_examples=40)
@given(room=st.integers(1, 60), layers=st.integers(1, 5), slots=st.integers(1, 3), data=st.data())
def test_staged_spans_are_those_of_one_plain_move(room, layers, slots, data):
    donors = [host_donor(14, 1), host_donor(13, 2)]
    chosen = data.draw(st.lists(st.sampled_from(MOVES), min_size=1, unique=True))
    moves = [Move(donors[donor], *place) for donor, *place in chosen]
    expected, target = empty_target(), empty_target()
    kv_move(moves, expected, ROTATION)
    reader = HostReader(CPU, ROTATION, staging(room * layers, slots))
    layers = reader.layers_at_once(layers, room)
    place = reader.placing(moves, target, layers)
    for first in range(0, 5, layers):
        place(first, min(first + layers, 5))
    torch.testing.assert_close(target.pool, expected.pool, atol=0, rtol=0, equal_nan=True)


@settings(max_examples=30)
@given(capacity=st.one_of(st.none(), st.integers(1, 130)), tokens=st.integers(1, 23), first=st.integers(1, 23))
def test_fetched_rows_are_bit_for_bit_those_of_the_blocks(capacity, tokens, first):
    source = PagedKv(torch.randn(8, 5, 2, GEOMETRY.row_elements), torch.tensor([5, 0, 3, 7, 1, 2]), GEOMETRY)
    sizes = [first, tokens - first] if first < tokens else [tokens]
    parts = [torch.full((5, size, 2, 2, 8), math.nan).permute(0, 2, 3, 1, 4) for size in sizes]
    held = HostKv(tuple(map(ContiguousKv, parts)))
    expected = torch.full((5, 2, 2, tokens, 8), math.nan)
    HostWriter(ROTATION, None if capacity is None else staging(capacity, 1)).copy(source, tokens, held)
    kv_move([Move(source, 0, 0, tokens)], ContiguousKv(expected), ROTATION)
    assert torch.equal(whole(held), expected)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=30)
@given(capacity=st.one_of(st.none(), st.integers(1, 130)), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_promoted_rows_are_bit_for_bit_those_of_the_host_and_nothing_else_is_written(device, capacity, sizes):
    held = HostKv(tuple(host_donor(size, seed, device) for seed, size in enumerate(sizes)))
    expected, target = empty_target(device), empty_target(device)
    kv_move([Move(ContiguousKv(whole(held).to(device)), 0, 0, held.capacity)], expected, ROTATION)
    HostWriter(ROTATION, None if capacity is None else staging(capacity, 1, device)).copy_up(held, target)
    torch.testing.assert_close(target.pool, expected.pool, atol=0, rtol=0, equal_nan=True)


def test_staging_without_room_for_a_token_is_refused():
    with pytest.raises(ConfigurationError, match="raise SEMBLEND_STAGING_BYTES"):
        Staging(3 * ROW_BYTES - 1, 3, GEOMETRY, torch.float32, CPU)


@pytest.mark.promise("engines", "Plans over latent attention come out...")
@pytest.mark.promise(
    "engines",
    "Of a partial rotation only the channels that turn are moved: K and V of the lowest layer are those of a cold run",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift", [37, 512, -20, 0])
def test_placed_keys_of_the_first_layer_are_those_of_a_cold_run(tiny_model_paths, family, shift):
    """The first layer's K and V depend on token and position only, so a shifted donor's must match a cold run's."""
    placed, cold = _placed_and_cold(tiny_model_paths[family], shift)
    assert float((placed[0] - cold[0]).norm() / cold[0].norm()) <= 1e-5


def test_placed_keys_of_a_first_layer_without_rope_are_those_of_a_cold_run(tmp_path):
    path = save_tiny_model("smollm3", tmp_path, no_rope_layers=[0, 1, 0])
    placed, cold = _placed_and_cold(path, 37)
    torch.testing.assert_close(placed[0], cold[0], rtol=1e-6, atol=1e-6)


def _placed_and_cold(path, shift):
    """KV of a run that was moved, and a cold run's, both [layers, kv_factor, kv_heads, tokens, head_dim]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(0, 256, (50,), generator=generator)
    donor_start, target_start = max(0, -shift), max(0, shift)
    donor_kv, cold_kv = (
        _kv_of(model, torch.cat((torch.randint(0, 256, (before,), generator=generator), shared, shared[:5])))
        for before in (donor_start, target_start)
    )
    placed, own = ContiguousKv(torch.full_like(cold_kv, math.nan)), slice(target_start, target_start + 50)
    kv_move([Move(ContiguousKv(donor_kv), donor_start, target_start, 50)], placed, model_facts(path).rotation)
    assert not bool(placed.tensor[:, :, :, own].isnan().any())
    return placed.tensor[:, :, :, own], cold_kv[:, :, :, own]


def _kv_of(model, tokens):
    """The model's own cache of a prompt, [layers, kv_factor, kv_heads, tokens, head_dim]."""
    with torch.inference_mode():
        # A cache that is made without the model's configuration keeps all tokens, beyond a window too.
        cache = model(tokens[None], past_key_values=DynamicCache(), use_cache=True).past_key_values
    is_latent = cache.layers[0].keys.shape != cache.layers[0].values.shape
    rows = latent_rows if is_latent else lambda keys, values: torch.cat((keys, values))
    return torch.stack([rows(layer.keys, layer.values) for layer in cache.layers])
