"""An iteration's plans are loaded from either tier, staged or not; a plan that cannot be loaded harms no other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.layout import KvGeometry
from kernels.rope import RopeRotation
from semblend_trt.donors.arena import DeviceTier
from semblend_trt.donors.host_memory import HostMemory
from semblend_trt.donors.store import DonorStore
from semblend_trt.donors.tiers import HostTier
from semblend_trt.errors import DonorUnavailableError, PlanError
from semblend_trt.layer_readiness import LayerReadiness
from semblend_trt.loader import PlanLoader
from semblend_trt.materialize import materialize
from semblend_trt.plan import (
    AttentionMode,
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    PublicationPolicy,
    SemanticKvPlan,
)
from semblend_trt.staging import HostReader, Staging

GEOMETRY = KvGeometry(num_layers=3, kv_heads=2, head_dim=8, block_size=4)
ROTATION = RopeRotation((1.0, 0.1, 0.01, 0.001), 8)
CPU = torch.device("cpu")
READERS = {
    "in one call": lambda: None,
    "staged": lambda: HostReader(CPU, ROTATION, Staging(2 * 7 * 128, 2, GEOMETRY, torch.float32, CPU)),
    "read in place": lambda: HostReader(CPU, ROTATION, None),
}


def kv(tokens, seed):
    return torch.randn(3, 2, 2, tokens, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def store():
    """Donor "near" lies in the arena, "far" and "wide" in host memory."""
    built = DonorStore(HostTier(1 << 20, pin=False), DeviceTier(6, GEOMETRY, torch.float32, CPU))
    with built.device.writing("near", 13) as target:
        blocks = target.pool.unflatten(3, (2, 4, 8))
        for position, row in enumerate(kv(13, 1).unbind(3)):
            blocks[target.block_ids[position // 4], :, :, :, position % 4] = row
    built.host.save("far", kv(15, 2))
    return built


def plan(*spans, request_id=1, blocks=(7, 2, 9, 0, 4, 6)):
    end = max((span.target_end for span in spans), default=0)
    return SemanticKvPlan(
        request_id=request_id,
        namespace_key="space",
        kind=PlanKind.REQUEST_LOCAL_SEGMENTED,
        publication=PublicationPolicy.REQUEST_LOCAL,
        spans=spans,
        prompt_token_ids=tuple(range(24)),
        num_computed_tokens=0,
        matched_tokens=end,
        block_size=4,
        execution=EngineExecution(EngineMode.WRAPPER, AttentionMode.HOLES_AND_SUFFIX, 3, end),
        target_block_ids=blocks,
    )


MIXED = plan(PlanSpan("near", 2, 0, 9), PlanSpan("far", 1, 9, 12), PlanSpan("near", 0, 22, 1))


def empty_pool():
    return torch.full((20, 3, 2, GEOMETRY.row_elements), math.nan)


def loader(store, pool, reader=None, readiness=None):
    return PlanLoader(store, pool, GEOMETRY, ROTATION, readiness or LayerReadiness(), reader)


@pytest.mark.parametrize("reader", READERS)
def test_a_donor_in_parts_is_placed_like_one_in_a_piece(store, reader):
    token_bytes = 3 * 2 * 2 * 8 * 4
    host = HostTier(20 * token_bytes, pin=False, memory=HostMemory(20 * token_bytes, lock=False))
    for donor_id in "abcd":
        host.save(donor_id, kv(5, 3))
    assert all(host.drop(donor_id) for donor_id in "acd")
    host.save("far", kv(15, 2))
    assert [part.capacity for part in host.get("far").parts] == [10, 5]
    whole, scattered = empty_pool(), empty_pool()
    far = plan(PlanSpan("far", 1, 9, 12), PlanSpan("far", 8, 21, 2))
    for pool, tier in ((whole, store.host), (scattered, host)):
        assert loader(DonorStore(tier, None), pool, READERS[reader]()).load([far]) == []
    torch.testing.assert_close(scattered, whole, atol=0, rtol=0, equal_nan=True)
    assert not whole.isnan().all()


@pytest.mark.parametrize("reader", READERS)
def test_both_tiers_serve_one_plan_as_plain_tensors_would(store, reader):
    pool, expected = empty_pool(), empty_pool()
    loads = loader(store, pool, READERS[reader]())
    assert loads.load([MIXED]) == []
    donors = {"near": kv(13, 1), "far": kv(15, 2)}
    with store.reading("near") as near:
        materialize(MIXED, {"near": near, "far": store.host.get("far")}, expected, GEOMETRY, ROTATION)
    torch.testing.assert_close(pool, expected, atol=0, rtol=0, equal_nan=True)
    placed = pool.unflatten(3, (2, 4, 8))
    assert torch.equal(placed[4, :, 1, :, 0], donors["far"][:, 1, :, 8])  # V of position 16
    timing = loads.last_timing
    assert (timing.device_tokens + timing.host_tokens) == 22
    assert timing.host_tokens == (0 if reader == "in one call" else 12)
    assert timing.milliseconds() >= 0


@pytest.mark.parametrize("reader", READERS)
def test_a_plan_that_cannot_be_loaded_harms_no_other(store, reader):
    pool, alone = empty_pool(), empty_pool()
    missing = plan(PlanSpan("far", 0, 0, 4), PlanSpan("gone", 0, 4, 4), request_id=2, blocks=(10, 11))
    outside = plan(PlanSpan("far", 0, 0, 4), request_id=3, blocks=(20,))
    homeless = plan(PlanSpan("far", 0, 0, 4), request_id=4, blocks=None)
    failed = loader(store, pool, READERS[reader]()).load([missing, MIXED, outside, homeless])
    assert [(plan.request_id, type(error)) for plan, error in failed] == [
        (2, DonorUnavailableError),
        (3, ValueError),
        (4, PlanError),
    ]
    loader(store, alone).load([MIXED])
    torch.testing.assert_close(pool, alone, atol=0, rtol=0, equal_nan=True)


def test_plans_that_place_nothing_need_no_blocks(store):
    pool = empty_pool()
    nothing = replace(plan(), matched_tokens=3, execution=replace(plan().execution, suffix_start=3))
    assert loader(store, pool).load([replace(nothing, target_block_ids=None)]) == []
    assert bool(pool.isnan().all())


def test_donors_are_let_go_when_the_load_is_queued(store):
    loader(store, empty_pool()).load([MIXED])
    assert store.drop("near")
    assert store.device.used_bytes == 0


def test_an_error_half_way_fails_every_plan_of_the_call(store, monkeypatch):
    reader = HostReader(CPU, ROTATION, None)
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        raise RuntimeError("injected")

    monkeypatch.setattr(reader, "place", fails)
    other = plan(PlanSpan("near", 0, 0, 4), request_id=5, blocks=(12,))
    failed = loader(store, empty_pool(), reader).load([MIXED, other])
    assert [plan.request_id for plan, _ in failed] == [1, 5]
    assert len(calls) == 1
    assert store.drop("near")
    assert store.device.used_bytes == 0


def test_leftovers_of_the_load_before_are_joined_first(store):
    readiness = LayerReadiness()
    readiness.expect([(3, object())])
    loader(store, empty_pool(), None, readiness).load([])
    assert not readiness.is_arriving
