"""Kept tokens that all layers compute speak against KV that the check does not see to be wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine_wrapper.sequence_work import witnesses_of, works_of
from semblend_trt.plan import SpanCheck
from semblend_trt.ranks import Ranks
from tests.engine_wrapper.forward_bench import KEEP_ALL, NUM_LAYERS, SIZES, Bench, PlanMaker, close, load, tokens_of
from tests.engine_wrapper.serving import (
    BLOCK,
    DOCUMENT,
    DONOR,
    GREEDY,
    SHIFTED,
    WATCHED,
    Engines,
    assert_same,
    serve,
    teach,
    text,
)
from tests.engine_wrapper.test_computed_keys import KeepingBench
from tests.kernels.builders import FP8
from tests.semblend_trt.held_donors import held_kv
from tests.semblend_trt.rank_threads import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from semblend_trt.plan import CheckEvidence, SemanticKvPlan

LENGTH, SPANS = 90, [(9, 24), (24, 40), (66, 80)]
WATCHING = SpanCheck(1, 0.5, witness_every=5, witness_bounds=(0.01, 0.01, 0.01))
SAMPLED = replace(WATCHING, sample_every=2, sample_threshold=0.4)
# Keeps whatever it compares.
ALL = replace(WATCHING, threshold=KEEP_ALL)


def placed(bench: Bench, plan: SemanticKvPlan, wrong_from: int = NUM_LAYERS, is_nan: bool = False) -> torch.Tensor:
    """Places spans as a cold run computes them, wrong ones in the layers from `wrong_from` on; returns its logits."""
    tokens = tuple(plan.prompt_token_ids.tolist())
    logits, kv = bench.cold(tokens)
    other = bench.cold(tokens_of(LENGTH, seed=50))[1]
    kv[wrong_from:] = float("nan") if is_nan else other[wrong_from:]
    for start, end in SPANS:
        bench.place(1, kv, start, end)
    return logits[plan.prefix_end :]


def run(bench: Bench, plan: SemanticKvPlan) -> tuple[torch.Tensor, list[tuple[int, SemanticKvPlan]], CheckEvidence]:
    """The plan's logits, the works to run again, and the evidence."""
    witnesses = bench.forward.witnesses(works_of([bench.planned(plan)], NUM_LAYERS))
    for layer in range(NUM_LAYERS):
        witnesses.take(layer + 1)
    (logits,) = bench.run(bench.planned(plan), max_rows=None)
    (found,) = bench.evidence
    witnesses.note(found)
    told: list[CheckEvidence] = []
    refused = list(witnesses.refused(told.append))
    (evidence,) = told
    return logits, refused, evidence


@pytest.fixture(
    params=[("qwen2", None), ("deepseek_v3", None), ("deepseek_v3", FP8)], ids=["plain", "latent", "latent in fp8"]
)
def bench(request: pytest.FixtureRequest, tiny_model_paths: dict[str, Path]) -> Bench:
    family, kv_dtype = request.param
    return Bench(load(tiny_model_paths[family]), kv_dtype=kv_dtype)


@pytest.mark.parametrize("check", [WATCHING, SAMPLED], ids=["dense", "sampled"])
def test_witnesses_of_right_kv_are_computed_and_agree(bench: Bench, make_plan: PlanMaker, check: SpanCheck) -> None:
    plan = make_plan(tokens_of(LENGTH), SPANS, exact={0}, **SIZES, check=check)
    wanted = placed(bench, plan)
    logits, refused, evidence = run(bench, plan)
    assert close(logits, wanted)
    assert refused == []
    checked = np.concatenate([np.arange(*span) for span in SPANS[1:]])
    chosen = checked[witnesses_of([16, 14], 5, 0)]
    assert evidence.witnesses == tuple(chosen.tolist())
    assert (evidence.recomputed_tokens, evidence.reused_tokens) == (len(chosen), 45 - len(chosen))
    assert len(evidence.largest_witness) == 3
    assert all(0 <= value < 1e-3 for value in evidence.largest_witness)


@pytest.mark.parametrize("is_nan", [False, True], ids=["other KV", "NaN"])
@pytest.mark.parametrize("check", [WATCHING, SAMPLED], ids=["dense", "sampled"])
def test_kv_that_is_wrong_in_the_last_layer_only_is_refused_with_all_but_exact_spans(
    bench: Bench, make_plan: PlanMaker, check: SpanCheck, is_nan: bool
) -> None:
    plan = make_plan(tokens_of(LENGTH), SPANS, exact={0}, **SIZES, check=check)
    placed(bench, plan, NUM_LAYERS - 1, is_nan)
    _, [(index, again)], evidence = run(bench, plan)
    assert index == 0
    assert [(span.target_start, span.exact) for span in again.spans] == [(9, True)]
    assert (evidence.is_dropped, evidence.reused_tokens, evidence.recomputed_tokens) == (True, 15, 30)
    assert [value <= 0.01 for value in evidence.largest_witness] == [True, True, False]


def test_what_the_check_has_computed_is_no_witness(bench: Bench, make_plan: PlanMaker) -> None:
    plan = make_plan(tokens_of(LENGTH), SPANS, **SIZES, check=replace(WATCHING, threshold=0.0))
    placed(bench, plan, wrong_from=1)
    _, refused, evidence = run(bench, plan)
    assert (refused, evidence.witnesses, evidence.is_dropped) == ([], (), True)


def test_without_witnesses_nothing_is_copied_or_compared(bench: Bench, make_plan: PlanMaker) -> None:
    plan = make_plan(tokens_of(LENGTH), SPANS, **SIZES, check=SpanCheck(1, 0.5))
    assert not bench.forward.witnesses(works_of([bench.planned(plan)], NUM_LAYERS))


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_what_is_restored_is_the_donors_in_the_pool_and_beside_it(
    tiny_model_paths: dict[str, Path], make_plan: PlanMaker, family: str
) -> None:
    """To the bit, and nothing but witnesses."""
    bench, plan = KeepingBench(tiny_model_paths[family]), make_plan(tokens_of(LENGTH), SPANS, **SIZES, check=ALL)
    placed(bench, plan, wrong_from=0)
    donor = torch.randn(bench.kept().shape, generator=torch.Generator().manual_seed(6)).to(bench.keys.device)
    for start, end in SPANS:
        bench.keep(donor, start, end)
    witnesses = bench.forward.witnesses(works_of([bench.planned(plan)], NUM_LAYERS))
    for end in (1, NUM_LAYERS):
        witnesses.take(end)

    def held() -> list[torch.Tensor]:
        """The bytes of KV, and those of keys, token by token."""
        both = bench.kv(1), bench.kept()[:, None]
        return [each.permute(3, 0, 1, 2, 4).contiguous().view(torch.uint8) for each in both]

    before = held()
    bench.run(bench.planned(plan))
    (evidence,) = bench.evidence
    behind = held()
    witnesses.restore()
    chosen = list(evidence.witnesses)
    others = sorted({*range(len(before[0]))} - {*chosen})
    assert chosen
    for restored, theirs, ours in zip(held(), before, behind, strict=True):
        assert torch.equal(restored[chosen], theirs[chosen])
        assert torch.equal(restored[others], ours[others])
        assert (ours != theirs)[chosen].flatten(3).any(-1).all()


def test_ranks_that_share_the_heads_refuse_alike(tiny_qwen2_path: Path, make_plan: PlanMaker) -> None:
    plan = make_plan(tokens_of(LENGTH), SPANS, **SIZES, check=WATCHING)

    def refused(model: Any, ranks: Ranks) -> tuple[int, CheckEvidence]:
        bench = Bench(model, ranks=ranks)
        placed(bench, plan, wrong_from=NUM_LAYERS - 1)
        _, again, evidence = run(bench, plan)
        return len(again), evidence

    one, alone = refused(load(tiny_qwen2_path), Ranks())
    models = [load(tiny_qwen2_path) for _ in range(2)]
    first, second = on_ranks(2, lambda ranks: refused(models[ranks.rank], ranks))
    assert first == second
    assert first[0] == one == 1
    assert first[1].largest_witness == pytest.approx(alone.largest_witness, abs=1e-4)
    assert first[1].witnesses == alone.witnesses


# -- in engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("sampled", [0, 8], ids=["dense", "sampled"])
@pytest.mark.parametrize("max_num_tokens", [8192, 100])
def test_a_donor_that_is_wrong_in_the_last_layer_only_is_not_used(
    engine: Engines, profile: Any, is_wrong: bool, sampled: int, max_num_tokens: int
) -> None:
    check = WATCHED.model_copy(update={"sample_every": sampled, "sample_threshold": 1.0})
    llm = engine(PROFILE=profile(check=check), max_num_tokens=max_num_tokens)
    teach(llm, DONOR)
    host = llm.connector_worker.store.host
    if is_wrong:
        with torch.inference_mode():
            held_kv(host, *host._slots).tensor[-1] *= 1e-4
    bystander = text(7, 130)
    outputs = llm.generate([bystander, SHIFTED], GREEDY)
    llm.settle()
    cold = engine.cold()
    assert_same(outputs[0], serve(cold, bystander))
    report = llm.connector_scheduler.reuse_of(outputs[1].request_id)
    assert report.witness_tokens > 0
    assert report.largest_witness[0] <= 100
    assert (report.largest_witness[1] > 100) == is_wrong
    if not is_wrong:
        assert (report.outcome, report.reason) == ("backend_materialized_reuse", None)
        assert report.reused_tokens + report.recomputed_tokens == len(DOCUMENT)
        assert report.reused_tokens > 0
        return
    assert (report.outcome, report.reason) == ("backend_declined_reuse", "witness_deviation")
    assert (report.reused_tokens, report.recomputed_tokens) == (0, len(DOCUMENT))
    assert llm.connector_scheduler.outcomes.reasons() == {"no_donor_match": 2, "witness_deviation": 1}
    assert_same(outputs[1], serve(cold, SHIFTED))
    # It was computed as a cold run computes it, so it may be published.
    assert serve(llm, SHIFTED).cached_tokens >= len(SHIFTED) // BLOCK * BLOCK - BLOCK
