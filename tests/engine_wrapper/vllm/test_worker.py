"""What keeps the worker half out of an engine: it starts all the same, says why, and serves as stock vLLM."""

import pytest

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm import worker
from tests.engine_wrapper.vllm.conftest import NEW


def no_layout(*_):
    """As for caches that no known view reads back."""


def another_runner():
    raise LookupError("the model runner is of a kind that is not known")


def another_backend(*_):
    raise LayoutError("attention_backend", "the attention backend is FLASHINFER")


@pytest.mark.parametrize(
    ("reason", "changed", "settings", "sentence"),
    [
        ("pool_layout", ("layered_pool", no_layout), {}, "KV is not reused (pool_layout)"),
        ("model_runner", ("find_runner", another_runner), {}, "of a kind that is not known"),
        ("attention_backend", ("own_builder", another_backend), {}, "the attention backend is FLASHINFER"),
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
    assert (served.ask(NEW, max_tokens=16), served.runtime.refusal) == (cold(NEW), reason)
    assert served.scheduler.outcomes.reasons() == {reason: 1}
    assert sentence in "".join(each.getMessage() for each in caplog.records if each.name == worker.__name__)
    assert "forward" not in vars(served.core.model_executor.driver_worker.worker.model_runner.get_model())
