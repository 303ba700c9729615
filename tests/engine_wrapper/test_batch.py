"""Plans that need more rows than one forward may have decide, write and answer what they do in one forward."""

from dataclasses import replace
from resource import RUSAGE_THREAD, getrusage

import numpy as np
import pytest
import torch

from engine_wrapper.batch import Batch, EngineForward
from engine_wrapper.deviation_check import window_means, windows_of
from engine_wrapper.token_schedule import SequenceSlice, works_of
from kernels.layout import KvGeometry
from semblend_trt.plan import BudgetLevel, SpanCheck
from semblend_trt.ranks import Ranks
from tests.engine_wrapper.forward_bench import DEVICE, NUM_LAYERS, Bench, close, load, tokens_of
from tests.semblend_trt.rank_threads import on_ranks

# Shares of fewer tokens than deviate: among the others rounding alone would choose.
TERMS = {
    "boundary": {"boundary": 2},
    "boundary and heads": {"boundary": 1, "head": 3},
    "threshold": {"check": SpanCheck(1, 0.5)},
    "largest share": {"check": SpanCheck(1, largest_share=0.3)},
    "whole spans": {"check": SpanCheck(1, 0.5, max_span_share=0.33)},
    "dropped": {"check": SpanCheck(1, 0.5, min_saved_share=0.9)},
    "lowest layer": {"check": SpanCheck(0, largest_share=0.3)},
    "last layer": {"check": SpanCheck(NUM_LAYERS - 1, largest_share=0.3)},
    "below a boundary": {"check": SpanCheck(0, largest_share=0.3), "boundary": 2},
    "behind heads": {"check": SpanCheck(1, largest_share=0.25), "head": 4},
}
LENGTH, SPANS, MAX_ROWS = 90, [(9, 24), (24, 40), (66, 80)], 20


@pytest.fixture
def bench(tiny_qwen2_path):
    return Bench(load(tiny_qwen2_path))


def place_donor(bench, plan):
    """Places spans in a NaN pool whose KV deviates in some tokens only; returns the logits of a cold run."""
    tokens = tuple(plan.prompt_token_ids.tolist())
    logits, kv = bench.cold(tokens, plan.request_id)
    other = bench.cold(tokens_of(LENGTH, seed=50), plan.request_id)[1]
    bench.place(plan.request_id, kv, *SPANS)
    bench.place(plan.request_id, other, *((start + 2, start + 7) for start, _ in SPANS))
    return logits[plan.prefix_end :]


def alike(found, expected):
    """But for the rounding of deviations."""
    names = "largest_kept", "sampled_deviation"
    return found == [
        replace(each, **{name: pytest.approx(getattr(each, name), abs=1e-4) for name in names}) for each in expected
    ]


@pytest.mark.parametrize("terms", TERMS)
def test_parts_write_decide_and_answer_what_one_forward_does(bench, make_plan, terms):
    plan = make_plan(tokens_of(LENGTH, 1), SPANS, request_id=1, **TERMS[terms])
    bystander = bench.slice(2, tokens_of(25, seed=8))
    found = []
    for options in ({}, {"max_rows": MAX_ROWS}, {"few_rows": LENGTH}):
        bench.clear()
        place_donor(bench, plan)
        logits = bench.run(bench.planned(plan), bystander, **options)
        found.append(([*logits, bench.kv(1)[:, :, :, :LENGTH]], bench.evidence, len(bench.lowest)))
    (wanted, evidence, _), (_, _, parts), (_, _, decided) = found
    assert (parts >= 4, decided) == (True, plan.is_checked)
    assert all(close(each, other) for own, *_ in found for each, other in zip(own, wanted, strict=True))
    assert all(alike(own, evidence) for _, own, _ in found)
    assert len(evidence) == (1 if plan.is_checked else 0)


SAMPLED = SpanCheck(1, 0.5, window_tokens=4, sample_every=2, sample_threshold=0.4)


@pytest.mark.promise("engines", "What is computed before a sample is read changes nothing where the sample fails")
@pytest.mark.parametrize("deviates", [False, True], ids=["likely", "in vain"])
def test_what_runs_before_a_sample_has_decided_changes_nothing(bench, make_plan, monkeypatch, deviates):
    check = replace(SAMPLED, sample_every=1)
    tokens, found = tokens_of(LENGTH), []
    plan, bystander = make_plan(tokens, SPANS, check=check), bench.slice(2, tokens_of(25, seed=8))
    wanted, kv = bench.cold(tokens, 1)
    other = bench.cold(tokens_of(LENGTH, seed=50), 1)[1]
    if deviates:
        kv[1:, :, :, 30:37] = other[1:, :, :, 30:37]
    for rows in (0, 512):
        monkeypatch.setattr("engine_wrapper.batch.MAX_SPECULATIVE_ROWS", rows)
        bench.clear()
        bench.place(1, kv, *SPANS)
        logits = bench.run(bench.planned(plan), bystander)
        assert close(logits[0], wanted[plan.prefix_end :])
        assert bench.forwards == (2 if rows and deviates else 1)
        found.append(([*logits, bench.kv(1)[:, :, :, :LENGTH], bench.kv(2)[:, :, :, :25]], bench.evidence))
    bench.place(1, kv, *SPANS)
    bench.run(bench.planned(plan), bystander)
    assert bench.forwards == 1, "nothing runs ahead of a sample where the last one failed"
    (waited, evidence), (speculative, told) = found
    assert all(close(each, other) for each, other in zip(speculative, waited, strict=True))
    assert (told, evidence[0].checked_tokens > 0) == (evidence, deviates)


@pytest.mark.promise("engines", "A sample compares a token of...")
@pytest.mark.parametrize("keys_per_row", [0, 1])
def test_windows_in_which_a_sampled_token_deviates_are_checked_as_without_a_sample(bench, make_plan, keys_per_row):
    tokens, found = tokens_of(LENGTH), []
    wanted, kv = bench.cold(tokens, 1)
    other = bench.cold(tokens_of(LENGTH, seed=50), 1)[1]
    for start, _ in SPANS:
        kv[1:, :, :, start + 2 : start + 7] = other[1:, :, :, start + 2 : start + 7]
    for check in (SAMPLED, replace(SAMPLED, sample_every=0)):
        plan = make_plan(tokens, SPANS, check=check)
        for options in ({}, {"max_rows": MAX_ROWS}, {"few_rows": LENGTH}):
            bench.clear()
            bench.place(1, kv, *SPANS)
            (logits,) = bench.run(bench.planned(plan), keys_per_row=keys_per_row, **options)
            assert close(logits, wanted[plan.prefix_end :])
            found.append((logits, bench.evidence))
    (whole, [evidence]), *parts, (_, [dense]), _, _ = found
    assert all(close(own, whole) and alike(told, [evidence]) for own, told in parts)
    checked = [min(end - start, 12) for start, end in SPANS]
    assert (evidence.checked_tokens, dense.checked_tokens) == (sum(checked), dense.offered_tokens)
    assert evidence.sampled_tokens > 0
    # Gaps that cost less to compute than to skip are closed, but windows that the sample has let pass stay open.
    deviating = 5 * len(SPANS)
    assert deviating + 4 * keys_per_row == evidence.recomputed_tokens
    assert dense.recomputed_tokens == (dense.offered_tokens if keys_per_row else deviating)


KEEP_ALL = 1e30
# A check whose thresholds never decide: the levels alone do.
LEVELLED = SpanCheck(1, KEEP_ALL, window_tokens=4, sample_every=2, sample_threshold=KEEP_ALL)


@pytest.mark.parametrize("compares_all", [True, False])
@pytest.mark.parametrize("max_rows", [None, MAX_ROWS])
@pytest.mark.parametrize(("share", "limit"), [(0.0, KEEP_ALL), (0.3, KEEP_ALL), (1.0, KEEP_ALL), (0.0, 1e-9)])
def test_a_samples_mean_deviation_gives_the_share_that_is_computed(
    bench, make_plan, share, limit, max_rows, compares_all
):
    check = replace(LEVELLED, levels=(BudgetLevel(limit, share),), compares_all=compares_all)
    plan = make_plan(tokens_of(LENGTH), SPANS, check=check)
    wanted = place_donor(bench, plan)
    (logits,) = bench.run(bench.planned(plan), max_rows=max_rows)
    (evidence,) = bench.evidence
    is_whole = limit < 1e-6
    assert (evidence.is_dropped, evidence.sampled_deviation > 1e-3) == (is_whole or share == 1.0, True)
    assert evidence.exceeds_levels == evidence.is_dropped
    computed = evidence.offered_tokens if is_whole else round(share * evidence.offered_tokens)
    assert evidence.recomputed_tokens == computed
    assert bool(evidence.checked_tokens) == (compares_all and (is_whole or share > 0))
    assert (bench.weighed > 0) == (share > 0)
    assert close(logits, wanted) == (computed == evidence.offered_tokens)


@pytest.mark.promise(
    "policies",
    "If a check compares its sample alone, suspect windows and the bound's share are computed in all layers, by the "
    "same attention in vLLM",
)
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_if_not_all_are_compared_the_samples_windows_and_attention_choose_and_no_layer_runs_on_the_rest(
    make_plan, share
):
    check = replace(LEVELLED, sample_threshold=0.5, levels=(BudgetLevel(KEEP_ALL, share),), compares_all=False)
    plan = make_plan(tokens_of(LENGTH), SPANS, check=check)
    tokens = tokens_of(LENGTH)[plan.prefix_end :]
    (work,) = works_of([SequenceSlice(1, plan.prefix_end, tokens, tuple(range(LENGTH)), plan)], NUM_LAYERS)
    rng = np.random.default_rng(0)
    checked, compared = work.pending.checked, work.sampled_tokens()
    found = rng.uniform(0.1, 0.4, len(compared)).astype(np.float32)
    found[:4] = 1.0  # the first window fails, and its neighbour is suspect, too
    attention = rng.random(LENGTH, dtype=np.float32)
    left, evidence = work.after_sample(compared, found)
    if share:
        assert evidence is None
        left, evidence = left.weighed(attention)
    window_of = windows_of(work.pending.lengths, 4)
    means = window_means(compared, found, window_of)[window_of] * attention[work.positions[checked]]
    means[:8] = np.inf
    computed = np.sort(np.argsort(-means)[: max(8, round(share * len(checked)))])
    assert left.positions.tolist() == np.delete(work.positions, np.delete(checked, computed)).tolist()
    assert (left.drops_at == NUM_LAYERS).all()
    assert (evidence.checked_tokens, evidence.recomputed_tokens) == (0, len(computed))


@pytest.mark.parametrize("most", [3, 64])
def test_the_attention_of_parts_and_of_ranks_is_that_of_one_forward(tiny_qwen2_path, make_plan, monkeypatch, most):
    monkeypatch.setattr("engine_wrapper.batch.MASS_ROWS", most)
    plan = make_plan(tokens_of(LENGTH), SPANS, check=replace(LEVELLED, levels=(BudgetLevel(KEEP_ALL, 0.3),)))

    def weigh(model, ranks, max_rows=None):
        bench = Bench(model, ranks)
        place_donor(bench, plan)
        (work,) = works_of([bench.planned(plan)], NUM_LAYERS)
        return torch.from_numpy(bench.engine(max_rows).attention({5: work.if_all_is_kept()}, DEVICE)[5].read())

    alone = weigh(load(tiny_qwen2_path), Ranks())
    assert close(weigh(load(tiny_qwen2_path), Ranks(), max_rows=7), alone)
    assert alone.shape == (LENGTH,)
    # Each row gives 1 in all.
    heads, rows = 4, min(most, LENGTH - sum(end - start for start, end in SPANS))
    assert float(alone.sum()) == pytest.approx((NUM_LAYERS - NUM_LAYERS // 2) * heads * rows, rel=1e-4)
    models = [load(tiny_qwen2_path) for _ in range(2)]
    both = on_ranks(2, lambda ranks: weigh(models[ranks.rank], ranks))
    assert all(close(each, alone) for each in both)


def test_no_call_of_a_forward_crosses_the_end_of_a_chunk_of_pythons_stack():
    taken = []

    def deep(frames, call):
        return deep(frames - 1, call) if frames else call()

    def run(*_):
        before = getrusage(RUSAGE_THREAD).ru_minflt
        for _ in range(100):
            deep(9, list)
        taken.append(getrusage(RUSAGE_THREAD).ru_minflt - before)
        return torch.zeros(1, 1)

    engine = EngineForward(KvGeometry(1, 1, 2, 4), Ranks(), run, run)
    batch = Batch((1,), (0,), (1,), 1, torch.zeros(1, dtype=torch.int64))
    for frames in range(200):
        deep(frames, lambda: batch.run({}, [[0]], engine))
    assert max(taken) < 50
