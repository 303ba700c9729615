"""What an engine is before its first plan: plans are executed where its first prompt has come out the same. What keeps
the worker half out is named and counted, and vLLM serves as without us."""

import logging
from unittest.mock import Mock

import pytest
import torch
import vllm
from vllm.model_executor.models import qwen2

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm import worker
from engine_wrapper.vllm.attention import VllmRows
from engine_wrapper.vllm.planned_forward import PlannedForward
from semblend_trt.reasons import Scope, advice
from tests.builders.vllm import DONOR, MOVED, NEW, transfer
from tests.engine_wrapper.watching import watched

UNKNOWN = LookupError("the model runner is of a kind that is not known")
ANOTHER = LayoutError("attention_backend", "the attention backend is FLASHINFER")


def asked(served):
    served.ask(DONOR, max_tokens=1)
    served.settle()
    return served.ask(MOVED, max_tokens=8)


@pytest.mark.promise("engines", "What vLLM's version, flags or a...")
@pytest.mark.promise("engines", "vLLM starts with any settings; what of them cannot be had is named and counted")
@pytest.mark.parametrize(
    ("reason", "changed", "settings", "transferred", "sentence"),
    [
        ("pool_layout", ("layered_pool", lambda *_: None), {}, {}, "KV is not reused (pool_layout)"),
        ("model_runner", ("find_runner", Mock(side_effect=UNKNOWN)), {}, {}, "of a kind that is not known"),
        ("attention_backend", ("own_builder", Mock(side_effect=ANOTHER)), {}, {}, "attention backend is FLASHINFER"),
        ("settings_invalid", None, {"device_bytes": 100}, {}, "raise SEMBLEND_DEVICE_BYTES to at least"),
        ("load_failure_policy", None, {}, {"kv_load_failure_policy": "fail"}, ""),
        ("kv_role", None, {}, {"kv_role": "kv_producer"}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_cannot_be_served_is_named_and_left_as_it_is(
    engine, cold, reason, changed, settings, transferred, sentence, monkeypatch, caplog
):
    if changed is not None:
        monkeypatch.setattr(worker, *changed)
    served = engine(None, kv_transfer_config=transfer("position_fix", settings, **transferred))
    assert (served.ask(NEW, max_tokens=8), served.refusal) == (cold(NEW), reason)
    assert served.report().reason == reason
    sentence = sentence or f"({reason}); vLLM serves as without us. {advice(reason, Scope.VLLM)}"
    assert sentence in "".join(each.getMessage() for each in caplog.records if each.name == worker.__name__)
    assert "forward" not in vars(served.runner.get_model())


@pytest.fixture
def unknown_version(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")


@pytest.mark.usefixtures("unknown_version")
def test_an_unknown_version_whose_first_prompt_comes_out_the_same_executes_plans(engine, caplog):
    told = logging.getLogger("vllm")
    told.addHandler(caplog.handler)  # vLLM's loggers may hand nothing on
    try:
        served = engine("position_fix")
        assert asked(served).cached > 400
    finally:
        told.removeHandler(caplog.handler)
    assert served.scheduler.namespace.backend_cache_layout.startswith("vllm-0.99/")
    lines = [told.handlers[0].format(each) for each in caplog.records if each.getMessage().startswith("semblend: ")]
    assert all("INFO " in line.partition("semblend: ")[0] for line in lines)
    ours = [line.split("] semblend: ")[-1] for line in lines if "hook: " not in line and "digest" not in line]
    assert [*dict.fromkeys(ours)] == [
        "KV reuse, once the engine's first prompt has come out the same: policy position_fix, host_bytes 268435456",
        "plans are executed on this engine: its first prompt came out the same",
    ]


@pytest.mark.promise("policies", "Before the first plan the wrapper...")
@pytest.mark.usefixtures("unknown_version")
@pytest.mark.parametrize("rows", ["whole", "output"])
def test_one_whose_first_prompt_comes_out_otherwise_is_served_as_stock(engine, cold, rows, monkeypatch):
    # On a card, which may multiply float32 as TF32, the bound is a twentieth.
    ours, factor = getattr(VllmRows, rows), 1.25 if torch.cuda.is_available() else 1.01
    monkeypatch.setattr(VllmRows, rows, lambda *given: ours(*given) * factor)
    served = engine("position_fix")
    assert (asked(served), served.runtime.mode.value) == (cold(MOVED), "stock")
    assert served.faults == {"self_check": 1}
    assert served.report().reason == "self_check"
    assert "forward" not in vars(served.runner.get_model())


def test_rows_that_a_later_graph_writes_over_are_compared_as_they_were(engine, monkeypatch):
    """On a card the engine's rows lie where graphs, which we replay too, have their outputs."""
    engines_rows, prove = [], PlannedForward._prove

    def kept(forward, arguments, options, hidden):
        engines_rows.append(hidden)
        prove(forward, arguments, options, hidden)

    monkeypatch.setattr(PlannedForward, "_prove", kept)
    watched(monkeypatch, VllmRows, "whole", lambda *_: engines_rows[-1].zero_())
    served = engine("position_fix")
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({}, {"is_neox_style": False}),
        ({"rope_type": "linear", "factor": 1.001}, {}),
        ({"partial_rotary_factor": 0.5}, {}),
    ],
    ids=str,
)
def test_layers_that_rotate_otherwise_are_served_as_stock(engine, monkeypatch, caplog, parameters, named):
    stock = qwen2.get_rope

    def other(*arguments, rope_parameters, **options):
        return stock(*arguments, rope_parameters={**rope_parameters, **parameters}, **options, **named)

    monkeypatch.setattr(qwen2, "get_rope", other)
    served = engine("position_fix")
    asked(served)
    served.forget()
    assert served.ask(MOVED, max_tokens=1).cached == 0
    assert (served.runtime.mode.value, dict(served.faults)) == ("stock", {"self_check": 1})
    assert "(rope_unknown): keys that turn as the model's configuration says, by 2032 positions in " in caplog.text
