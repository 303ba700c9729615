"""A plan's spans land at their positions, rotated, and nothing else is written; a lost donor writes nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from kernels.layout import ContiguousKv, KvGeometry, pool_view
from kernels.rope import RopeRotation, rotate_keys
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.donors.tiers import HostTier
from semblend_trt.errors import DonorUnavailableError, PlanError
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

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GEOMETRY = KvGeometry(num_layers=3, kv_heads=2, head_dim=8, block_size=4)
ROTATION = RopeRotation((1.0, 0.1, 0.01, 0.001), 8)
BLOCKS = (7, 2, 9, 0, 4, 6)


def plan_of(spans: Sequence[PlanSpan], *, computed: int = 0, prompt: int = 24, **changes: Any) -> SemanticKvPlan:
    prefix_end = max((span.target_end for span in spans), default=computed)
    execution = EngineExecution(EngineMode.WRAPPER, AttentionMode.HOLES_AND_SUFFIX, GEOMETRY.num_layers, prefix_end)
    fields: dict[str, Any] = {
        "request_id": 1,
        "namespace_key": "ns",
        "kind": PlanKind.REQUEST_LOCAL_SEGMENTED,
        "publication": PublicationPolicy.REQUEST_LOCAL,
        "spans": tuple(spans),
        "prompt_token_ids": tuple(range(prompt)),
        "num_computed_tokens": computed,
        "matched_tokens": prefix_end - computed,
        "block_size": GEOMETRY.block_size,
        "execution": execution,
        "target_block_ids": BLOCKS,
    }
    return SemanticKvPlan(**{**fields, **changes})


def donor_of(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> ContiguousKv:
    generator = torch.Generator().manual_seed(seed)
    return ContiguousKv(torch.randn(3, 2, 2, tokens, 8, generator=generator).to(dtype))


def empty_pool() -> torch.Tensor:
    return torch.full((10, 3, 2, GEOMETRY.row_elements), math.nan)


def position_in(pool: torch.Tensor, position: int) -> torch.Tensor:
    """The KV of one position, [layers, 2, kv_heads, head_dim]."""
    return pool_view(pool, GEOMETRY)[BLOCKS[position // 4], :, :, :, position % 4]


def test_spans_of_two_donors_are_placed_and_the_rest_stays_untouched() -> None:
    donors = {"a": donor_of(12, 1), "b": donor_of(9, 2)}
    spans = [PlanSpan("a", 6, 3, 5), PlanSpan("b", 1, 9, 8), PlanSpan("a", 0, 18, 3)]
    pool = empty_pool()
    assert materialize(plan_of(spans, computed=2), donors, pool, GEOMETRY, ROTATION) == 16
    placed = {position for span in spans for position in range(span.target_start, span.target_end)}
    for position in range(24):
        assert bool(position_in(pool, position).isnan().all()) == (position not in placed)
    for span in spans:
        for offset in range(span.length):
            donor = donors[span.donor_id].tensor[:, :, :, span.donor_start + offset]
            placed_kv = position_in(pool, span.target_start + offset)
            torch.testing.assert_close(placed_kv[:, 0], rotate_keys(donor[:, 0], span.shift, ROTATION))
            assert torch.equal(placed_kv[:, 1], donor[:, 1])


@settings(max_examples=40)
@given(data=st.data())
def test_the_exact_prefix_and_other_blocks_stay_bitwise(data: st.DataObject) -> None:
    computed = data.draw(st.integers(0, 10))
    position, spans = computed, []
    for donor_id in data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3)):
        start = position + data.draw(st.integers(0, 3))
        length = data.draw(st.integers(1, 5))
        if start + length > 23:
            break
        spans.append(PlanSpan(donor_id, data.draw(st.integers(0, 4)), start, length))
        position = start + length
    donors = {donor_id: donor_of(9, seed) for seed, donor_id in enumerate("abc")}
    pool = torch.randn(10, 3, 2, GEOMETRY.row_elements, generator=torch.Generator().manual_seed(5))
    before = pool.clone()
    moved = materialize(plan_of(spans, computed=computed), donors, pool, GEOMETRY, ROTATION)
    assert moved == sum(span.length for span in spans)
    for position in range(computed):
        assert torch.equal(position_in(pool, position), position_in(before, position))
    others = [block for block in range(10) if block not in BLOCKS]
    assert torch.equal(pool[others], before[others])


def test_donors_may_come_from_a_tier() -> None:
    tier, donor = HostTier(1 << 20, pin=False), donor_of(6, 3)
    tier.save("a", donor.tensor)
    pool = empty_pool()
    assert materialize(plan_of([PlanSpan("a", 2, 2, 4, exact=True)]), tier.get, pool, GEOMETRY, ROTATION) == 4
    assert torch.equal(position_in(pool, 3), donor.tensor[:, :, :, 3])
    tier.drop("a")
    with pytest.raises(DonorUnavailableError):
        materialize(plan_of([PlanSpan("a", 2, 2, 4)]), tier.get, pool, GEOMETRY, ROTATION)


@pytest.mark.parametrize("changes", [{}, {"kind": PlanKind.DISCOVERY_ONLY, "matched_tokens": 0}])
def test_a_plan_that_places_nothing_moves_nothing(changes: dict[str, Any]) -> None:
    spans = [PlanSpan("missing", 0, 4, 4)] if changes else []
    pool = empty_pool()
    assert materialize(plan_of(spans, target_block_ids=None, **changes), {}, pool, GEOMETRY, ROTATION) == 0
    assert bool(pool.isnan().all())


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, "donor b is not held"),
        (donor_of(5), r"donor b holds 5 tokens; the span needs 1\.\.6"),
        (donor_of(9, dtype=torch.float16), "donor b is torch.float16; the pool is torch.float32"),
        (ContiguousKv(torch.zeros(3, 2, 2, 9, 16)), r"donor b has shape \[3, 2, 2, 9, 16\]"),
        (ContiguousKv(torch.zeros(2, 2, 2, 9, 8)), "donor b has shape"),
        (ContiguousKv(torch.zeros(3, 2, 1, 9, 8)), "donor b has shape"),
        (ContiguousKv(torch.zeros(3, 2, 2, 9)), "donor b has shape"),
    ],
)
def test_a_donor_that_cannot_serve_stops_the_plan_before_anything_is_written(
    second: ContiguousKv | None, message: str
) -> None:
    donors = {"a": donor_of(9), **({} if second is None else {"b": second})}
    plan = plan_of([PlanSpan("a", 0, 0, 5), PlanSpan("b", 1, 7, 5)])
    pool = empty_pool()
    for source in (donors, donors.get, donors.__getitem__):
        with pytest.raises(DonorUnavailableError, match=message):
            materialize(plan, source, pool, GEOMETRY, ROTATION)
    assert bool(pool.isnan().all())


@pytest.mark.parametrize(
    ("changes", "invariant"),
    [
        ({"target_block_ids": None}, "blocks_unknown"),
        ({"block_size": 8}, "block_size_differs"),
    ],
)
def test_a_plan_that_does_not_fit_the_pool_is_refused(changes: dict[str, Any], invariant: str) -> None:
    pool = empty_pool()
    with pytest.raises(PlanError) as refused:
        materialize(plan_of([PlanSpan("a", 0, 0, 5)], **changes), {"a": donor_of(9)}, pool, GEOMETRY, ROTATION)
    assert refused.value.invariant == invariant
    assert bool(pool.isnan().all())


def test_a_block_outside_the_pool_is_refused() -> None:
    pool = empty_pool()
    plan = plan_of([PlanSpan("a", 0, 0, 5)], target_block_ids=(3, 10))
    with pytest.raises(ValueError, match=r"target.block_ids spans 3\.\.10, outside 0\.\.9"):
        materialize(plan, {"a": donor_of(9)}, pool, GEOMETRY, ROTATION)
    assert bool(pool.isnan().all())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("shift", [37, 512, -20, 0])
def test_placed_keys_of_the_first_layer_are_those_of_a_cold_run(
    tiny_model_paths: dict[str, Path], family: str, shift: int
) -> None:
    """The first layer's K and V depend on token and position only, so a shifted donor's must match a cold run's."""
    path = tiny_model_paths[family]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(0, 256, (50,), generator=generator)
    donor_start, target_start = max(0, -shift), max(0, shift)
    donor_kv, cold_kv = (
        _kv_of(model, torch.cat((torch.randint(0, 256, (before,), generator=generator), shared, shared[:5])))
        for before in (donor_start, target_start)
    )
    facts = model_facts(path)
    geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, block_size=16)
    blocks = torch.randperm(geometry.blocks_for(target_start + 55), generator=generator)
    plan = plan_of(
        [PlanSpan("donor", donor_start, target_start, 50)],
        prompt=target_start + 55,
        block_size=16,
        target_block_ids=tuple(blocks.tolist()),
    )
    pool = torch.full((blocks.numel(), facts.num_layers, 2, geometry.row_elements), math.nan)
    materialize(plan, {"donor": ContiguousKv(donor_kv)}, pool, geometry, facts.rotation)
    # placed has shape [layers, 2, kv_heads, tokens, head_dim]
    placed = (
        pool_view(pool, geometry)[blocks].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, target_start:][:, :, :, :50]
    )
    expected = cold_kv[:, :, :, target_start : target_start + 50]
    assert not bool(placed.isnan().any())
    assert float((placed[0] - expected[0]).norm() / expected[0].norm()) <= 1e-5


def _kv_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own cache of a prompt, [layers, 2, kv_heads, tokens, head_dim]."""
    with torch.inference_mode():
        cache = model(tokens[None], use_cache=True).past_key_values
    return torch.stack([torch.cat((layer.keys, layer.values)) for layer in cache.layers])
