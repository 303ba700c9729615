"""The wrapper computes what the plain model computes, and the comparison sees it when it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine_wrapper import layer_schedule
from engine_wrapper.embedded.model_runner import ModelRunner
from validation.exactness import max_logit_difference
from validation.gates import MAX_LOGIT_DIFFERENCE

if TYPE_CHECKING:
    from pathlib import Path

    from engine_wrapper.sequence_work import SequenceWork


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_every_family_is_exact(tiny_model_paths: dict[str, Path], family: str) -> None:
    runner = ModelRunner(tiny_model_paths[family], "float32", "cpu")
    tokens = torch.randint(0, 256, (333,), generator=torch.Generator().manual_seed(1)).tolist()
    assert max_logit_difference(runner, tokens) <= MAX_LOGIT_DIFFERENCE


def test_a_boundary_one_layer_too_low_is_seen(
    tiny_model_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(tiny_model_paths["qwen2"], "float32", "cpu")
    tokens = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    original = layer_schedule.work_of

    def one_layer_less(piece: layer_schedule.SequenceSlice, num_layers: int) -> SequenceWork:
        work = original(piece, num_layers)
        if piece.plan is None:
            return work
        promised = np.arange(len(work.positions)) < len(work.positions) - len(piece.token_ids)
        return replace(work, drops_at=work.drops_at - promised)

    monkeypatch.setattr(layer_schedule, "work_of", one_layer_less)
    assert max_logit_difference(runner, tokens) > 100 * MAX_LOGIT_DIFFERENCE


def test_too_few_tokens_are_refused(tiny_model_paths: dict[str, Path]) -> None:
    runner = ModelRunner(tiny_model_paths["qwen2"], "float32", "cpu")
    with pytest.raises(ValueError, match="at least 4"):
        max_logit_difference(runner, [1, 2, 3])
