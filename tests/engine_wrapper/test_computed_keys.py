"""Every row that is computed has its key beside the pool in fp8 as it was computed, and no other row does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from engine_wrapper.computed_keys import ComputedKeys
from kernels.layout import pool_view
from kernels.rope import saturated
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import SpanCheck
from tests.engine_wrapper.forward_bench import (
    DEVICE,
    NUM_LAYERS,
    SIZES,
    Bench,
    PlanMaker,
    close,
    load,
    tokens_of,
)
from tests.kernels.builders import FP8, error_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine_wrapper.forward_bench import Tokens

LENGTH, SPANS, PLANTED = 60, [(5, 20), (20, 45)], [9, 10, 23, 40]
DENSE = SpanCheck(1, 0.6)
CHECKS = {
    "dense": DENSE,
    "lowest": replace(DENSE, layer=0),
    "highest": replace(DENSE, layer=NUM_LAYERS - 1),
    "with witnesses": replace(DENSE, witness_every=5, witness_bounds=(1.0,)),
    "sampled": replace(DENSE, sample_every=2, sample_threshold=0.1),
    "sampled with witnesses": replace(
        DENSE, sample_every=2, sample_threshold=0.1, witness_every=5, witness_bounds=(1.0,)
    ),
}
FP8_NAN = 0x7F
# What a donor's keys have that no row has computed.
MARK = 1000.0
# Relative: sums of another length end at the next number of e4m3 here and there, which the layers above read.
NEAR = 0.02


class KeepingBench(Bench):
    """A bench over a pool in fp8 with keys beside it; what was not written is NaN in both."""

    def __init__(self, path: Path) -> None:
        super().__init__(load(path), kv_dtype=FP8)
        self.keys = self.forward.keep_keys()

    def clear(self) -> None:
        super().clear()
        self.keys.fill_(math.nan)

    def kept(self, request_id: int = 1, end: int | None = None) -> torch.Tensor:
        """A copy of a request's keys beside the pool: [layers, kv_heads, positions, head_dim]."""
        view = pool_view(self.keys, replace(self.geometry, kv_factor=1))[list(self._blocks[request_id - 1]), :, 0]
        return view.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end].clone()

    def keep(self, keys: torch.Tensor, start: int, end: int) -> None:
        """Writes positions start..end-1 of `keys` beside request 1's blocks."""
        view, size = pool_view(self.keys, replace(self.geometry, kv_factor=1)), self.geometry.block_size
        for position in range(start, end):
            view[self._blocks[0][position // size], :, 0, :, position % size] = keys[:, :, position]

    def computed(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, KV and keys of a run that reuses nothing; nothing is written any more afterwards."""
        logits = self.run(self.slice(1, tokens))[0]
        kv, keys = self.kv(1), self.kept()
        self.clear()
        return logits, kv, keys

    def check(self, expected: torch.Tensor) -> None:
        """The keys of request 1 are about those `expected`, the pool has them, rounded, and nothing else is kept."""
        keys = self.kept(end=LENGTH)
        assert keys.isfinite().all()
        assert close(keys[0], expected[0, :, :LENGTH])
        assert error_of(keys, expected[:, :, :LENGTH]) < NEAR
        assert torch.equal(bits(saturated(keys, FP8)), bits(self.kv(1, LENGTH)[:, 0]))
        assert self.keys[:-1].isfinite().sum() == keys.numel()


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


@pytest.fixture(params=["qwen2", "qwen3", "deepseek_v3"])
def bench(request: pytest.FixtureRequest, tiny_model_paths: dict[str, Path]) -> KeepingBench:
    return KeepingBench(tiny_model_paths[request.param])


def test_a_prompt_in_chunks_and_decode_steps_has_the_keys_of_one_prompt(bench: KeepingBench) -> None:
    tokens = tokens_of(LENGTH)
    logits, _, keys = bench.computed(tokens)
    assert error_of(torch.cat(bench.run_steps(tokens, 0, 13, 40, 55)), logits) < NEAR
    bench.check(keys)


def test_keeping_keys_changes_no_logit_and_no_stored_bit(bench: KeepingBench) -> None:
    tokens = tokens_of(LENGTH)
    without = Bench(bench.model, kv_dtype=FP8)
    logits, kv = without.cold(tokens)
    found = bench.run(bench.slice(1, tokens))[0]
    assert torch.equal(found, logits)
    assert torch.equal(bits(bench.kv(1, LENGTH)), bits(kv[:, :, :, :LENGTH]))
    exact = bench.kept(end=LENGTH)
    assert (saturated(exact, FP8).float() != exact).float().mean() > 0.9


def planted(bench: KeepingBench, check: SpanCheck, mark: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Places donors of request 1, of another prompt at a few tokens in the check's layer, and NaN there above it.
    Returns logits and keys of a cold run; `mark` is added to the donors' keys beside the pool."""
    logits, kv, keys = bench.computed(tokens_of(LENGTH))
    wrong = bench.computed(tokens_of(LENGTH, seed=9))[1]
    donor = keys + mark
    rows, others = (each.view(torch.uint8) for each in (kv, wrong))
    rows[check.layer, ..., PLANTED, :] = others[check.layer, ..., PLANTED, :]
    rows[check.layer + 1 :, ..., PLANTED, :] = FP8_NAN
    donor[check.layer :, :, PLANTED] = math.nan
    for start, end in SPANS:
        bench.place(1, kv, start, end)
        bench.keep(donor, start, end)
    return logits, keys


@pytest.mark.parametrize("max_rows", [None, 20])
@pytest.mark.parametrize("check", list(CHECKS.values()), ids=list(CHECKS))
def test_a_checked_plan_leaves_the_keys_of_a_cold_run(
    bench: KeepingBench, make_plan: PlanMaker, check: SpanCheck, max_rows: int | None
) -> None:
    logits, keys = planted(bench, check)
    plan = make_plan(tokens_of(LENGTH), SPANS, check=check, **SIZES)
    found = bench.run(bench.planned(plan, end=50), max_rows=max_rows)
    (evidence,) = bench.evidence
    assert evidence.recomputed_tokens == len({*PLANTED, *evidence.witnesses})
    found += bench.run_steps(tokens_of(LENGTH), 50, 55)
    assert error_of(torch.cat(found), logits[45:]) < NEAR
    bench.check(keys)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_keys_are_the_donors_where_its_kv_is_kept(bench: KeepingBench, make_plan: PlanMaker, layer: int) -> None:
    """In the check's layer and below, all rows were computed."""
    check = SpanCheck(layer, 0.6, witness_every=5, witness_bounds=(1.0,))
    _, keys = planted(bench, check, MARK)
    bench.run(bench.planned(make_plan(tokens_of(LENGTH), SPANS, check=check, **SIZES)))
    (evidence,) = bench.evidence
    marked = torch.zeros(NUM_LAYERS, LENGTH, dtype=torch.bool, device=DEVICE)
    marked[layer + 1 :, SPANS[0][0] : SPANS[-1][1]] = True
    marked[:, [*PLANTED, *evidence.witnesses]] = False
    expected = keys[:, :, :LENGTH] + MARK * marked[:, None, :, None]
    assert close(bench.kept(end=LENGTH), expected)


@pytest.mark.parametrize("boundary", range(NUM_LAYERS + 1))
def test_keys_are_the_donors_from_the_boundary_on(bench: KeepingBench, make_plan: PlanMaker, boundary: int) -> None:
    tokens = tokens_of(LENGTH)
    _, kv, keys = bench.computed(tokens)
    bench.place(1, kv, 5, 45)
    bench.keep(keys + MARK, 5, 45)
    bench.run(bench.planned(make_plan(tokens, [(5, 45)], boundary=boundary, **SIZES)))
    keys[boundary:, :, 5:45] += MARK
    assert close(bench.kept(end=LENGTH), keys[:, :, :LENGTH])


def test_the_kernels_keep_the_same_keys(
    tiny_qwen3_path: Path, make_plan: PlanMaker, interpret: Callable[[], None]
) -> None:
    """The kernels through Triton's interpreter, which truncates to e4m3, against torch."""
    plain, kernels = (KeepingBench(tiny_qwen3_path) for _ in range(2))
    plan = make_plan(tokens_of(LENGTH), SPANS, check=CHECKS["with witnesses"], **SIZES)
    for each in (plain, kernels):
        planted(each, DENSE, MARK)
    plain.run(plain.planned(plan))
    interpret()
    kernels.run(kernels.planned(plan))
    found, expected = (each.kept(end=LENGTH) for each in (kernels, plain))
    assert close(found[0], expected[0])
    # The marks stand at the same tokens, of which there are some.
    marks = expected > MARK / 2
    assert torch.equal(found > MARK / 2, marks)
    assert marks.any()
    assert error_of(found - MARK * marks, expected - MARK * marks) < 0.2


def test_keys_that_find_no_memory_stop_the_engine_with_a_sentence(tiny_qwen2_path: Path) -> None:
    bench = Bench(load(tiny_qwen2_path), kv_dtype=FP8)
    with pytest.raises(ConfigurationError, match=r"do not fit on .* beside the cache; .*SEMBLEND_DONOR_DTYPE to cache"):
        ComputedKeys.beside(1 << 50, bench.geometry, torch.float32, bench.pool.device)
