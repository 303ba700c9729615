"""Plans are executed where the engine's first prompt has come out the same; elsewhere vLLM is served as without us."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import vllm

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
    ours = getattr(VllmRows, rows)
    monkeypatch.setattr(VllmRows, rows, lambda *given: ours(*given) * 1.01)
    served = engine("position_fix")
    assert asked(served) == cold(MOVED)
    assert served.runtime.mode.value == "stock"
    assert served.runtime.faults == {"self_check": 1}
    assert "forward" not in vars(served.core.model_executor.driver_worker.worker.model_runner.get_model())
