"""Mixtures of experts inside vLLM: its own layers route the rows of plans, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.forward_context import get_forward_context

from tests.conftest import MIXTURES, save_tiny_model
from tests.engine_wrapper.vllm.conftest import DOCUMENT, MOVED, Answered, Served, cold_answers, near, taught

if TYPE_CHECKING:
    import torch

Engine = Callable[..., Served]
Models = Callable[..., Path]
Cold = Callable[..., Answered]

pytestmark = pytest.mark.usefixtures("blocks_for_windows")

LAYERS = 3
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = ("boundary", {"recompute_boundary_layer": LAYERS})
# Heads as wide as vLLM's attention on a CPU needs them, and room for the prompts.
SIZES = {"head_dim": 32, "vocab_size": 2000, "max_position_embeddings": 2048}
# vLLM wants experts in a GLM, and one layer of a gpt-oss would have a window.
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": None, "first_k_dense_replace": 0, "sliding_window": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def model(family: str, layers: int = LAYERS) -> Path:
        sizes = SIZES | (ONE_LAYER if layers == 1 else {})
        return save_tiny_model(family, tmp_path_factory.mktemp(family), **sizes)

    return model


@pytest.fixture(scope="module")
def cold(models: Models) -> Cold:
    """The answer of vLLM without a connector."""

    @cache
    def answer(*model: Any) -> Answered:
        return cold_answers(MOVED, model=models(*model))(MOVED)

    return answer


def assert_cold(served: Served, cold: Answered) -> None:
    answer = served.ask(MOVED, max_tokens=16)
    assert served.offered >= len(DOCUMENT)
    assert answer.tokens == cold.tokens
    assert near(answer.logprobs, cold.logprobs)
    assert not served.runtime.faults


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in MIXTURES),
        ("glm4_moe", {"enforce_eager": False}),
        ("qwen3_moe", {"max_num_batched_tokens": 64}),
    ],
    ids=str,
)
def test_with_all_layers_computed_again_answers_are_cold_ones(
    engine: Engine, models: Models, cold: Cold, family: str, options: dict[str, Any]
) -> None:
    answer = cold(family)
    assert_cold(taught(engine(*WHOLE, model=models(family), **options)), answer)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_moved_run_is_that_of_a_cold_run_where_one_layer_is_all(
    engine: Engine, models: Models, cold: Cold, family: str
) -> None:
    """K and V of the lowest layer depend on token and position only."""
    answer = cold(family, 1)
    assert_cold(taught(engine("position_fix", model=models(family, 1))), answer)


def test_experts_are_found_where_the_engine_counts_their_layers(
    engine: Engine, models: Models, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does before torch 2.11."""
    answer = cold("mixtral")
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.runner.moe_runner._USE_LAYERNAME", False)
    served = engine(*WHOLE, model=models("mixtral"))
    served.core.vllm_config.compilation_config.fast_moe_cold_start = True
    assert_cold(taught(served), answer)


def test_no_row_of_a_plan_counts_as_padding(engine: Engine, models: Models) -> None:
    served = taught(engine(*WHOLE, model=models("mixtral")))
    model = served.core.model_executor.driver_worker.worker.model_runner.get_model()
    found: list[tuple[int, torch.Tensor | None]] = []

    def mark(module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        get_forward_context().is_padding = options["positions"] < 0

    def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append((len(arguments[0]), get_forward_context().is_padding))

    model.register_forward_pre_hook(mark, with_kwargs=True)
    model.model.layers[1].block_sparse_moe.register_forward_pre_hook(note)
    served.ask(MOVED, max_tokens=2)
    (rows, in_plan), (row, in_decode) = found
    assert (rows > len(DOCUMENT), in_plan) == (True, None)
    assert (row, in_decode.tolist() if in_decode is not None else None) == (1, [False])
