"""What keeps the worker half out of an engine: it starts all the same, says why, and serves as stock vLLM."""

from copy import copy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm import worker
from tests.engine_wrapper.vllm.conftest import NEW

UNKNOWN = LookupError("the model runner is of a kind that is not known")
ANOTHER = LayoutError("attention_backend", "the attention backend is FLASHINFER")


@pytest.mark.parametrize(
    ("reason", "changed", "settings", "sentence"),
    [
        ("pool_layout", ("layered_pool", lambda *_: None), {}, "KV is not reused (pool_layout)"),
        ("model_runner", ("find_runner", Mock(side_effect=UNKNOWN)), {}, "of a kind that is not known"),
        ("attention_backend", ("own_builder", Mock(side_effect=ANOTHER)), {}, "the attention backend is FLASHINFER"),
        ("settings_invalid", None, {"device_bytes": 100}, "raise SEMBLEND_DEVICE_BYTES to at least"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_cannot_be_served_is_named_and_left_as_it_is(
    engine, cold, reason, changed, settings, sentence, monkeypatch, caplog
):
    if changed is not None:
        monkeypatch.setattr(worker, *changed)
    served = engine("position_fix", settings)
    assert (served.ask(NEW, max_tokens=16), served.refusal) == (cold(NEW), reason)
    assert served.scheduler.outcomes.reasons() == {reason: 1}
    assert sentence in "".join(each.getMessage() for each in caplog.records if each.name == worker.__name__)
    assert "forward" not in vars(served.core.model_executor.driver_worker.worker.model_runner.get_model())


def test_a_configuration_without_the_step_s_size_is_a_counted_fallback(engine, cold, monkeypatch):
    def without_size(arguments, config):
        config = copy(config)
        config.scheduler_config = SimpleNamespace()
        return stock(arguments, config)

    stock = worker.VllmWorker
    monkeypatch.setattr(worker, "VllmWorker", without_size)
    served = engine("position_fix")
    assert served.ask(NEW, max_tokens=16) == cold(NEW)
    assert (served.refusal, served.faults["hook"]) == ("model_runner", 1)
