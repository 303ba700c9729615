"""Checked plans, through the model's own layers and through fused ones: what differs is computed, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from semblend_trt.plan import CheckEvidence, SpanCheck
from semblend_trt.ranks import Ranks
from tests.engine_wrapper.checked_bench import (
    BLOCK_SIZE,
    DEVICE,
    KEEP_ALL,
    NUM_LAYERS,
    Bench,
    PlanMaker,
    close,
    load,
    plan_of,
    tokens_of,
)
from tests.semblend_trt.rank_threads import on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def bench(request: pytest.FixtureRequest, tiny_qwen2_path: Path) -> Bench:
    return Bench(load(tiny_qwen2_path), fused=request.param)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("boundary", [0, 2])
def test_another_prompts_kv_is_found_out_and_the_result_is_cold(
    bench: Bench, make_plan: PlanMaker, layer: int, boundary: int
) -> None:
    tokens = tokens_of(50)
    logits, kv = bench.cold(tokens)
    bench.place(1, bench.cold(tokens_of(50, seed=9))[1], 4, 40)
    plan = plan_of(make_plan, tokens, [(4, 20), (22, 40)], SpanCheck(layer, 0.0), boundary=boundary)
    assert close(bench.run(bench.planned(plan))[0], logits[40:])
    assert close(bench.kv(1)[:, :, :, :50], kv[:, :, :, :50])
    assert bench.evidence == [CheckEvidence(1, 34, 34, 0, 34, 0.0, is_dropped=True)]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_kept_kv_is_read_above_the_check_and_fresh_up_to_it(bench: Bench, make_plan: PlanMaker, layer: int) -> None:
    """The same as a boundary at the layer over a donor whose KV of that layer is the request's own."""
    tokens = tokens_of(50)
    cold_logits, own = bench.cold(tokens)
    donor = bench.cold(tokens_of(50, seed=9))[1]
    bench.place(1, torch.cat([own[: layer + 1], donor[layer + 1 :]]), 4, 40)
    plan = make_plan(tokens, [(4, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=layer)
    wanted = bench.run(bench.planned(plan))[0]
    bench.pool.fill_(float("nan"))
    bench.place(1, donor, 4, 40)
    logits = bench.run(bench.planned(plan_of(make_plan, tokens, [(4, 40)], SpanCheck(layer, KEEP_ALL))))[0]
    assert close(logits, wanted)
    if layer < NUM_LAYERS - 1:
        assert not close(logits, cold_logits[40:])
    kv = bench.kv(1)[:, :, :, 4:40]
    assert close(kv[: layer + 1], own[: layer + 1, :, :, 4:40])
    assert torch.equal(kv[layer + 1 :], donor[layer + 1 :, :, :, 4:40])
    (evidence,) = bench.evidence
    assert (evidence.reused_tokens, evidence.recomputed_tokens, evidence.is_dropped) == (36, 0, False)
    assert evidence.largest_kept > 0.1


@pytest.mark.parametrize("kind", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_planted_tokens_are_computed_and_the_result_is_cold(
    bench: Bench, make_plan: PlanMaker, layer: int, kind: int
) -> None:
    """The donor's KV is the request's own but for a few tokens: wrong in the check's layer, NaN above."""
    tokens, planted = tokens_of(60), [9, 10, 23, 40]
    logits, own = bench.cold(tokens)
    donor = own.clone()
    donor[layer, kind, :, planted] *= 3
    donor[layer + 1 :, :, :, planted] = float("nan")
    bench.place(1, donor, 5, 45)
    plan = plan_of(make_plan, tokens, [(5, 20), (20, 45)], SpanCheck(layer, 0.1))
    assert close(bench.run(bench.planned(plan))[0], logits[45:])
    assert close(bench.kv(1)[:, :, :, :60], own[:, :, :, :60])
    (evidence,) = bench.evidence
    assert (evidence.checked_tokens, evidence.recomputed_tokens) == (40, len(planted))
    assert evidence.largest_kept < 1e-3


@pytest.mark.parametrize("max_rows", [None, 20])
def test_rows_of_short_gaps_are_computed_and_the_result_is_cold(
    bench: Bench, make_plan: PlanMaker, max_rows: int | None
) -> None:
    """Wrong in the check's layer at the planted tokens; NaN above in those and in short gaps."""
    tokens, planted, between = (
        tokens_of(60),
        [9, 11, 16, 22, 40],
        [10, 12, 13, 14, 15, 17, 18, 19, 20, 21, 41, 42, 43, 44],
    )
    logits, own = bench.cold(tokens)
    donor = own.clone()
    donor[1, :, :, planted] *= 3
    donor[2:, :, :, planted + between] = float("nan")
    bench.place(1, donor, 5, 45)
    plan = plan_of(make_plan, tokens, [(5, 20), (20, 45)], SpanCheck(1, 0.1))
    assert close(bench.run(bench.planned(plan), max_rows=max_rows, keys_per_row=3)[0], logits[45:])
    assert close(bench.kv(1)[:, :, :, :60], own[:, :, :, :60])
    (evidence,) = bench.evidence
    assert (evidence.checked_tokens, evidence.reused_tokens, evidence.recomputed_tokens) == (40, 21, 19)


def test_the_largest_share_finds_the_planted_tokens(bench: Bench, make_plan: PlanMaker) -> None:
    tokens, planted = tokens_of(60), [9, 10, 23, 40]
    logits, own = bench.cold(tokens)
    donor = own.clone()
    donor[1:, :, :, planted] += 5
    bench.place(1, donor, 5, 45)
    plan = plan_of(make_plan, tokens, [(5, 45)], SpanCheck(1, largest_share=0.1))
    assert close(bench.run(bench.planned(plan))[0], logits[45:])
    assert bench.evidence[0].recomputed_tokens == len(planted)


def test_heads_are_computed_without_a_check(bench: Bench, make_plan: PlanMaker) -> None:
    tokens = tokens_of(50)
    logits, own = bench.cold(tokens)
    donor = own.clone()
    donor[..., 4:7, :] = donor[..., 20:23, :] = float("nan")
    bench.place(1, donor, 4, 40)
    plan = make_plan(tokens, [(4, 20), (20, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, head=3)
    assert close(bench.run(bench.planned(plan))[0], logits[40:])
    assert bench.evidence == []


def test_exact_kv_is_neither_computed_nor_written(bench: Bench, make_plan: PlanMaker) -> None:
    """The engine's prefix of 8, an exact span up to 24, a planted token behind it."""
    tokens = tokens_of(60)
    logits, own = bench.cold(tokens)
    bench.place(1, own, 0, 24)
    exact = bench.kv(1)[:, :, :, :24]
    donor = own.clone()
    donor[:, :, :, 33] *= 2
    bench.place(1, donor, 26, 48)
    plan = plan_of(make_plan, tokens, [(8, 24), (26, 48)], SpanCheck(1, 0.1), num_computed=8, exact={0})
    assert close(bench.run(bench.planned(plan))[0], logits[48:])
    assert torch.equal(bench.kv(1)[:, :, :, :24], exact)
    (evidence,) = bench.evidence
    assert (evidence.offered_tokens, evidence.checked_tokens) == (38, 22)
    assert (evidence.reused_tokens, evidence.recomputed_tokens) == (37, 1)


def test_chunks_and_decode_steps_follow_a_checked_plan(bench: Bench, make_plan: PlanMaker) -> None:
    tokens = tokens_of(60)
    logits, own = bench.cold(tokens)
    donor = own.clone()
    donor[:, :, :, 12] *= 2
    bench.place(1, donor, 6, 30)
    parts = bench.run(bench.planned(plan_of(make_plan, tokens, [(6, 30)], SpanCheck(1, 0.1)), end=37))
    parts += bench.run(bench.slice(1, tokens, 37, 55))
    parts += [bench.run(bench.slice(1, tokens, position, position + 1))[0] for position in range(55, 60)]
    assert close(torch.cat(parts), logits[30:])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_checks_in_two_layers_a_boundary_and_decode_share_one_forward(
    tiny_model_paths: dict[str, Path], make_plan: PlanMaker, family: str, fused: bool
) -> None:
    bench = Bench(load(tiny_model_paths[family]), fused)
    prompts = {request_id: tokens_of(length, length) for request_id, length in ((1, 50), (2, 61), (3, 40), (4, 33))}
    cold = {request_id: bench.cold(tokens, request_id) for request_id, tokens in prompts.items()}
    planted = {1: [8, 30], 2: [25]}
    for request_id, (start, end) in ((1, (5, 31)), (2, (20, 48)), (3, (0, 16))):
        donor = cold[request_id][1].clone()
        donor[1:, :, :, planted.get(request_id, [])] *= 2
        bench.place(request_id, donor, start, end)
    bench.place(2, cold[2][1], 0, 16)
    bench.place(4, cold[4][1], 0, 32)
    options: dict[str, Any] = {"num_layers": NUM_LAYERS, "block_size": BLOCK_SIZE}
    first = make_plan(prompts[1], [(5, 31)], check=SpanCheck(2, 0.1), **options)
    second = make_plan(
        prompts[2], [(20, 48)], request_id=2, num_computed=16, check=SpanCheck(1, 0.1), boundary=2, **options
    )
    third = make_plan(prompts[3], [(0, 16)], request_id=3, boundary=1, **options)
    logits = bench.run(
        bench.planned(first),
        bench.slice(4, prompts[4], 32, 33),
        bench.planned(second, end=57),
        bench.planned(third),
    )
    wanted = (cold[1][0][31:], cold[4][0][32:], cold[2][0][48:57], cold[3][0][16:])
    assert all(close(actual, expected) for actual, expected in zip(logits, wanted, strict=True))
    # The lower layer decides first.
    assert [(each.request_id, each.recomputed_tokens) for each in bench.evidence] == [(2, 1), (1, 2)]


@pytest.mark.skipif(DEVICE == "cuda", reason="the tests above run the kernels there")
def test_the_kernels_find_the_same_tokens(
    tiny_qwen3_path: Path, make_plan: PlanMaker, interpret: Callable[[], None]
) -> None:
    """The fused layers through Triton's interpreter against the model's own layers in torch."""
    tokens = tokens_of(44)
    plain, fused = (Bench(load(tiny_qwen3_path), fused=fused) for fused in (False, True))
    _, own = plain.cold(tokens)
    other = plain.cold(tokens_of(44, seed=3))[1]
    donor = own.clone()
    donor[:, :, :, 18:27] = other[:, :, :, 18:27]
    plan = plan_of(make_plan, tokens, [(5, 20), (22, 40)], SpanCheck(1, 0.2))
    plain.place(1, donor, 5, 40)
    fused.place(1, donor, 5, 40)
    wanted = plain.run(plain.planned(plan))[0]
    interpret()
    logits = fused.run(fused.planned(plan))[0]
    assert close(logits, wanted)
    assert close(fused.kv(1)[:, :, :, :44], plain.kv(1)[:, :, :, :44])
    (found,), (expected,) = fused.evidence, plain.evidence
    assert replace(found, largest_kept=0.0) == replace(expected, largest_kept=0.0)
    assert expected.recomputed_tokens == 7
    assert found.largest_kept == pytest.approx(expected.largest_kept, abs=1e-4)


def test_compiling_kernels_leaves_the_pool_alone(bench: Bench) -> None:
    tokens = tokens_of(30)
    logits, _ = bench.cold(tokens)
    bench.forward.compile_kernels()
    assert bench.pool.isnan().all()
    assert torch.equal(bench.run(bench.slice(1, tokens))[0], logits)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_ranks_that_share_the_heads_decide_what_one_would(
    tiny_qwen2_path: Path, make_plan: PlanMaker, fused: bool
) -> None:
    tokens, other = tokens_of(60), tokens_of(60, seed=9)
    plan = plan_of(make_plan, tokens, [(5, 45)], SpanCheck(1, largest_share=0.3))

    def run(model: Any, ranks: Ranks) -> tuple[torch.Tensor, list[CheckEvidence]]:
        bench = Bench(model, fused, ranks)
        bench.place(1, bench.cold(other)[1], 5, 45)
        return bench.run(bench.planned(plan))[0], bench.evidence

    expected, (evidence,) = run(load(tiny_qwen2_path), Ranks())
    models = [load(tiny_qwen2_path) for _ in range(2)]
    (first, found), (second, told) = on_ranks(2, lambda ranks: run(models[ranks.rank], ranks))
    assert torch.equal(first, second)
    assert close(first, expected)
    assert found == told == [replace(evidence, largest_kept=pytest.approx(evidence.largest_kept, rel=1e-4))]
    assert (evidence.reused_tokens, evidence.recomputed_tokens) == (28, 12)
