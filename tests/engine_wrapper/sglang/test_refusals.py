"""Which engines of SGLang are refused by name, and serve as stock."""

import pytest
from sglang.srt.server_args import ServerArgs

from engine_wrapper.sglang.refusals import engine_refusal_of
from tests.engine_wrapper.sglang.conftest import WARM
from validation.models import shipped_model


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disable_radix_cache": True}, "radix_disabled"),
        ({"json_model_override_args": '{"rope_theta": 5000}'}, "model_kwargs"),
    ],
)
def test_refused_engines_serve_as_stock(serve, caplog, options, reason):
    with serve(**options) as served:
        assert type(served.cache).__name__ == "UnifiedRadixCache"
        assert f"({reason})" in caplog.text
        assert len(served.ask(WARM).tokens) == 8


@pytest.mark.promise("engines", "What SGLang's version, options or model do not allow is refused by name")
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tp_size", 2, "tensor_parallel"),
        ("pp_size", 2, "pipeline_parallel"),
        ("dp_size", 2, "data_parallel"),
        ("dcp_size", 2, "context_parallel"),
        ("enable_hierarchical_cache", True, "hierarchical_cache"),
        ("enable_unified_cache_external_linker", True, "hierarchical_cache"),
        ("disaggregation_mode", "prefill", "disaggregated"),
        ("speculative_algorithm", "EAGLE", "speculative_decoding"),
        ("enable_lora", True, "lora"),
        ("enable_streaming_session", True, "sessions"),
        ("kv_cache_dtype", "fp8_e4m3", "kv_cache_dtype"),
        ("enable_unified_memory", True, "memory_layout"),
        ("enable_torch_compile", True, "compiled_prefill"),
        ("enable_pdmux", "of another kind", "split_prefill"),
    ],
)
def test_options_are_refused_by_name(name, value, reason):
    arguments = ServerArgs(model_path=str(shipped_model()), device="cpu")
    assert engine_refusal_of(arguments) is None
    setattr(arguments, name, value)
    assert engine_refusal_of(arguments) == reason


@pytest.mark.promise("engines", "What SGLang's version, options or model...")
def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr("sglang.version.__version__", "0.5.22")
    assert engine_refusal_of(None) == "sglang_version"


def test_settings_that_cannot_be_used_turn_reuse_off(serve, caplog):
    with serve({"POLICY": "verified", "HOST_BYTES": "-1"}) as served:
        assert type(served.cache).__name__ == "UnifiedRadixCache"
        assert "(settings_invalid)" in caplog.text
