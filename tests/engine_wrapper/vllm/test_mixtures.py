"""Mixtures of experts inside vLLM: its own layers route the rows of plans, however many there are."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import KVTransferConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner import moe_runner

from tests.conftest import MIXTURES, save_tiny_model
from tests.engine_wrapper.vllm.conftest import SHORT, Answered, Served, serving
from validation.vllm_engine import TRANSFER

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

Engine = Callable[..., Served]
Cold = Callable[[Path], Answered]

RANDOM = random.Random(5)
SHIFT, LAYERS, LENGTH = 50, 3, 300
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = {"policy": "boundary", "recompute_boundary_layer": LAYERS}


def some(count: int) -> list[int]:
    return [RANDOM.randrange(256) for _ in range(count)]


DOCUMENT = some(LENGTH)
DONOR, MOVED = [*some(20), *DOCUMENT, *some(20)], [*some(20 + SHIFT), *DOCUMENT, *some(40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Random models whose heads are as wide as vLLM's attention on a CPU needs them."""

    @cache
    def model(family: str, layers: int = LAYERS) -> Path:
        one = {"layer_types": None, "first_k_dense_replace": 0}  # vLLM wants experts in a GLM
        changes = {"num_hidden_layers": 1, **one} if layers == 1 else {}
        return save_tiny_model(family, tmp_path_factory.mktemp(family), head_dim=32, **changes)

    return model


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Makes the one engine of a test, with our connector."""
    opened: list[Served] = []

    def make(model: Path, extra: dict[str, Any], **options: Any) -> Served:
        transfer = KVTransferConfig(**TRANSFER, kv_connector_extra_config={**SHORT, **extra})
        opened.append(serving(model, max_model_len=1024, kv_transfer_config=transfer, **options))
        return opened[-1]

    yield make
    for served in opened:
        served.close()


@pytest.fixture(scope="module")
def cold() -> Callable[[Path], Answered]:
    """Answers of vLLM without a connector."""

    @cache
    def answer(model: Path) -> Answered:
        served = serving(model, max_model_len=1024, enable_prefix_caching=False)
        try:
            found: Answered = served.ask(MOVED, max_tokens=16)
            return found
        finally:
            served.close()

    return answer


def taught(served: Served) -> Served:
    served.ask(DONOR, max_tokens=1)
    served.settle()
    assert served.runtime.mode.value == "wrapper"
    return served


def assert_cold(served: Served, cold: Answered) -> None:
    answer = served.ask(MOVED, max_tokens=16)
    assert answer.cached > LENGTH
    assert answer.tokens == cold.tokens
    assert answer.logprobs == pytest.approx(cold.logprobs, abs=1e-3)
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
    engine: Engine, models: Callable[..., Path], cold: Cold, family: str, options: dict[str, Any]
) -> None:
    answer = cold(models(family))
    assert_cold(taught(engine(models(family), WHOLE, **options)), answer)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_moved_run_is_that_of_a_cold_run_where_one_layer_is_all(
    engine: Engine, models: Callable[..., Path], cold: Cold, family: str
) -> None:
    """K and V of the lowest layer depend on token and position only."""
    answer = cold(models(family, 1))
    assert_cold(taught(engine(models(family, 1), {"policy": "position_fix"})), answer)


def test_experts_are_found_where_the_engine_counts_their_layers(
    engine: Engine, models: Callable[..., Path], cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does before torch 2.11."""
    answer = cold(models("mixtral"))
    monkeypatch.setattr(moe_runner, "_USE_LAYERNAME", False)
    served = engine(models("mixtral"), WHOLE)
    served.core.vllm_config.compilation_config.fast_moe_cold_start = True
    assert_cold(taught(served), answer)


def test_no_row_of_a_plan_counts_as_padding(engine: Engine, models: Callable[..., Path]) -> None:
    served = taught(engine(models("mixtral"), WHOLE))
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
    assert (rows > LENGTH, in_plan) == (True, None)
    assert (row, in_decode.tolist() if in_decode is not None else None) == (1, [False])
