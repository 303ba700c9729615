"""Plans are executed where the engine's first prompt has come out the same; elsewhere vLLM is served as without us."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm.planned_forward import ModelRunner, PlannedForward, model_runner_of_caller
from engine_wrapper.vllm.rows import VllmRows
from tests.engine_wrapper.vllm.conftest import DONOR, MOVED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine_wrapper.vllm.conftest import Answered, Cold, Served


def asked(served: Served) -> Answered:
    served.ask(DONOR, max_tokens=1)
    served.settle()
    answer: Answered = served.ask(MOVED, max_tokens=16)
    return answer


@pytest.fixture
def unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")


@pytest.mark.usefixtures("unknown_version")
def test_an_unknown_version_whose_first_prompt_comes_out_the_same_executes_plans(
    engine: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    told = logging.getLogger("vllm.semblend")
    caplog.set_level(logging.INFO, told.name)
    told.addHandler(caplog.handler)  # vLLM's loggers may hand nothing on
    try:
        served = engine("position_fix")
        assert asked(served).cached > 400
    finally:
        told.removeHandler(caplog.handler)
    assert served.scheduler.namespace.backend_cache_layout.startswith("vllm-0.99/")
    assert {each.getMessage() for each in caplog.records if each.name == told.name} == {
        "KV reuse: policy position_fix, host_bytes 268435456",
        "plans are executed on this engine: its first prompt came out the same",
    }


@pytest.mark.usefixtures("unknown_version")
@pytest.mark.parametrize("rows", ["whole", "output"])
def test_one_whose_first_prompt_comes_out_otherwise_is_served_as_stock(
    engine: Callable[..., Served], cold: Cold, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a card, which may multiply float32 as TF32, the bound is a twentieth.
    ours, factor = getattr(VllmRows, rows), 1.25 if torch.cuda.is_available() else 1.01
    monkeypatch.setattr(VllmRows, rows, lambda *given: ours(*given) * factor)
    served = engine("position_fix")
    assert asked(served) == cold(MOVED)
    assert served.runtime.mode.value == "stock"
    assert served.runtime.faults == {"self_check": 1}
    assert served.scheduler.outcomes.of(served.last).reason == "self_check"
    assert served.scheduler.outcomes.reasons()["self_check"] > 0
    assert "forward" not in vars(served.core.model_executor.driver_worker.worker.model_runner.get_model())


def test_rows_that_a_later_graph_writes_over_are_compared_as_they_were(
    engine: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card the engine's rows lie where graphs, which we replay too, have their outputs."""
    engines_rows, prove, ours = list[torch.Tensor](), PlannedForward._prove, VllmRows.whole

    def kept(forward: PlannedForward, arguments: Any, options: Any, hidden: torch.Tensor) -> None:
        engines_rows.append(hidden)
        prove(forward, arguments, options, hidden)

    def replayed(*given: Any) -> torch.Tensor:
        found = ours(*given)
        engines_rows[-1].zero_()
        return found

    monkeypatch.setattr(PlannedForward, "_prove", kept)
    monkeypatch.setattr(VllmRows, "whole", replayed)
    served = engine("position_fix")
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
    assert not served.runtime.faults


# -- both of vLLM's model runners are known by what they hold, and left as they were found -----------------------------


class SecondRunner(GPUModelRunner):
    """vLLM's V2 runner at the time when it registers its caches; without a card it makes no batches."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        self.attn_groups: list[Any] = []
        self.model = torch.nn.Linear(1, 1)
        self.cudagraph_manager = SimpleNamespace(cudagraph_mode=mode)

    def register(self) -> ModelRunner:
        return model_runner_of_caller()

    def prepare_inputs(self, *arguments: Any, **options: Any) -> InputBatch:
        batch = InputBatch.__new__(InputBatch)
        batch.req_ids = list(arguments[0])
        return batch


class FirstRunner:
    """vLLM's V1 runner, as far as a planned forward reads it."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        self.attn_groups: list[Any] = []
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.compilation_config = SimpleNamespace(cudagraph_mode=mode)
        self.model = torch.nn.Linear(1, 1)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def register(self) -> ModelRunner:
        return model_runner_of_caller()


def test_the_second_runner_tells_the_order_of_every_step_and_is_left_as_it_was() -> None:
    runner = SecondRunner(CUDAGraphMode.PIECEWISE)
    found = runner.register()
    assert (found.runner, found.model, found.order()) == (runner, runner.model, [])
    for step in (["b", "a"], ["c"]):
        batch = runner.prepare_inputs(step, batch_desc=None)
        assert isinstance(batch, InputBatch)
        assert found.order() == step
    found.remove()
    assert "prepare_inputs" not in vars(runner)
    runner.prepare_inputs(["d"])
    assert found.order() == ["c"]


def test_the_first_runner_holds_its_batch() -> None:
    runner = FirstRunner(CUDAGraphMode.NONE)
    found = runner.register()
    runner.input_batch.req_ids = ["b"]
    assert (found.runner, found.model, found.order()) == (runner, runner.model, ["b"])
    found.remove()


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
@pytest.mark.parametrize(
    ("mode", "is_breakable", "is_refused"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, False, True),
        (CUDAGraphMode.FULL_DECODE_ONLY, False, True),
        (CUDAGraphMode.PIECEWISE, True, True),
        (CUDAGraphMode.NONE, True, False),
    ],
)
def test_steps_that_are_replayed_whole_are_refused(
    kind: type[Any], mode: CUDAGraphMode, is_breakable: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(is_breakable)))
    runner = kind(mode)
    if not is_refused:
        assert runner.register().model is runner.model
        return
    with pytest.raises(LayoutError) as refused:
        runner.register()
    assert refused.value.reason == "full_cuda_graphs"
    assert "prepare_inputs" not in vars(runner)


def test_another_runner_is_not_known() -> None:
    with pytest.raises(LookupError, match="not known"):
        model_runner_of_caller()
