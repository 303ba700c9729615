"""Mixtures of experts inside vLLM: its own layers route the rows of plans, however many there are."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import KVTransferConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner import moe_runner

from tests.conftest import MIXTURES, save_tiny_model
from tests.engine_wrapper.vllm.conftest import SHORT, serving
from validation.vllm_engine import TRANSFER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from tests.engine_wrapper.vllm.conftest import Answered, Served

RANDOM = random.Random(5)
SHIFT, LAYERS, LENGTH = 50, 3, 300
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = {"policy": "boundary", "recompute_boundary_layer": LAYERS}


def some(count: int) -> list[int]:
    return [RANDOM.randrange(256) for _ in range(count)]


DOCUMENT = some(LENGTH)
DONOR, MOVED = [*some(20), *DOCUMENT, *some(20)], [*some(20 + SHIFT), *DOCUMENT, *some(40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Random models whose heads are as wide as vLLM's attention on a CPU needs them."""
    made: dict[tuple[str, int], Path] = {}

    def model(family: str, layers: int = LAYERS) -> Path:
        if (family, layers) not in made:
            folder = tmp_path_factory.mktemp(family)
            alone = {"num_hidden_layers": 1, "layer_types": None} if layers == 1 else {}
            made[family, layers] = save_tiny_model(family, folder, head_dim=32, **alone)
        return made[family, layers]

    return model


@pytest.fixture
def engine() -> Iterator[Callable[..., Served]]:
    opened: list[Served] = []

    def make(model: Path, extra: dict[str, Any] | None = None, **options: Any) -> Served:
        while opened:
            opened.pop().close()
        if extra is not None:
            settings = {**SHORT, **extra}
            options["kv_transfer_config"] = KVTransferConfig(**TRANSFER, kv_connector_extra_config=settings)
        options["enable_prefix_caching"] = extra is not None
        opened.append(serving(model, max_model_len=1024, **options))
        return opened[-1]

    yield make
    for served in opened:
        served.close()


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


@pytest.mark.parametrize("options", [{}, {"enforce_eager": False}, {"max_num_batched_tokens": 64}], ids=str)
@pytest.mark.parametrize("family", MIXTURES)
def test_with_all_layers_computed_again_answers_are_cold_ones(
    engine: Callable[..., Served], models: Callable[..., Path], family: str, options: dict[str, Any]
) -> None:
    cold = engine(models(family)).ask(MOVED, max_tokens=16)
    assert_cold(taught(engine(models(family), WHOLE, **options)), cold)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_moved_run_is_that_of_a_cold_run_where_one_layer_is_all(
    engine: Callable[..., Served], models: Callable[..., Path], family: str
) -> None:
    """K and V of the lowest layer depend on token and position only."""
    cold = engine(models(family, 1)).ask(MOVED, max_tokens=16)
    assert_cold(taught(engine(models(family, 1), {"policy": "position_fix"})), cold)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_found_where_the_engine_counts_their_layers(
    engine: Callable[..., Served], models: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does before torch 2.11."""
    cold = engine(models(family)).ask(MOVED, max_tokens=16)
    monkeypatch.setattr(moe_runner, "_USE_LAYERNAME", False)
    served = engine(models(family), WHOLE)
    served.core.vllm_config.compilation_config.fast_moe_cold_start = True
    assert_cold(taught(served), cold)


def test_no_row_of_a_plan_counts_as_padding(engine: Callable[..., Served], models: Callable[..., Path]) -> None:
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
