"""The wrapper computes what the plain model computes, and the comparison sees it when it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine_wrapper import layer_schedule
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import SemBlendError
from validation.embedded_engine import EmbeddedEngines
from validation.exactness import Exactness, plain_difference, stock_difference
from validation.gates import MAX_LOGIT_DIFFERENCE

if TYPE_CHECKING:
    from pathlib import Path

    from engine_wrapper.sequence_work import SequenceWork


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_every_family_is_exact(tiny_model_paths: dict[str, Path], family: str) -> None:
    runner = ModelRunner(tiny_model_paths[family], "float32", "cpu")
    tokens = torch.randint(0, 256, (333,), generator=torch.Generator().manual_seed(1)).tolist()
    assert plain_difference(runner, tokens).difference <= MAX_LOGIT_DIFFERENCE


@pytest.fixture
def one_layer_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promised rows are dropped a layer too early."""
    original = layer_schedule.work_of

    def work_of(piece: layer_schedule.SequenceSlice, *options: int) -> SequenceWork:
        work = original(piece, *options)
        if piece.plan is None:
            return work
        promised = np.arange(len(work.positions)) < len(work.positions) - len(piece.token_ids)
        return replace(work, drops_at=work.drops_at - promised)

    monkeypatch.setattr(layer_schedule, "work_of", work_of)


@pytest.mark.usefixtures("one_layer_less")
def test_a_boundary_one_layer_too_low_is_seen(tiny_model_paths: dict[str, Path]) -> None:
    runner = ModelRunner(tiny_model_paths["qwen2"], "float32", "cpu")
    tokens = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    assert plain_difference(runner, tokens).difference > 100 * MAX_LOGIT_DIFFERENCE


def test_too_few_tokens_are_refused(tiny_model_paths: dict[str, Path]) -> None:
    runner = ModelRunner(tiny_model_paths["qwen2"], "float32", "cpu")
    with pytest.raises(ValueError, match="at least 4"):
        plain_difference(runner, [1, 2, 3])


def within_an_engine(path: Path) -> Exactness:
    tokens = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    return stock_difference(EmbeddedEngines(ModelRunner(path, "float32", "cpu")), str(path), "ours", tokens, 32)


def test_the_wrapper_is_exact_within_an_engine(tiny_model_paths: dict[str, Path]) -> None:
    found = within_an_engine(tiny_model_paths["qwen2"])
    assert found.against == "ours without the wrapper"
    assert max(found.difference, found.noise) <= MAX_LOGIT_DIFFERENCE


@pytest.mark.usefixtures("one_layer_less")
def test_a_boundary_one_layer_too_low_is_seen_within_an_engine(tiny_model_paths: dict[str, Path]) -> None:
    assert within_an_engine(tiny_model_paths["qwen2"]).difference > 10 * MAX_LOGIT_DIFFERENCE


def test_an_engine_that_executes_no_plan_is_no_proof(tiny_model_paths: dict[str, Path]) -> None:
    path = tiny_model_paths["qwen2"]
    engines = EmbeddedEngines(ModelRunner(path, "float32", "cpu"))
    with pytest.raises(SemBlendError, match=r"executes no plan \(no_donor_match\)"):
        stock_difference(engines, str(path), "ours", list(range(200)), min_span=400)
