"""What vLLM's configuration of an engine tells the connector's halves and the namespace of its KV."""

import copy
import gc
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.config import CacheConfig, replace, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention

from engine_wrapper.vllm.engine_spec import from_vllm_config, settings_of, settings_off, vllm_version
from semblend_trt.config import Settings, load_settings, variables_of
from semblend_trt.connector.attention_layout import LLAMA4
from semblend_trt.connector.lookup import namespace_for
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.namespace import is_content, is_unknown
from semblend_trt.policy import ReusePolicy
from semblend_trt.runtime import runtime_for
from tests.builders.vllm import engine_config
from tests.semblend_trt.samples import unknown_fields
from validation.models import shipped_model

HEADS, DIM, BLOCK, MODEL = 2, 64, 16, shipped_model()


def with_layers(config, cache=None):
    """The configuration as it is when vLLM has built attention layers and bound their caches."""
    if cache is None:
        cache = torch.empty(4, HEADS, BLOCK, 2 * DIM)
    with set_current_vllm_config(config):
        for name in ("model.layers.0", "model.layers.1"):
            layer = Attention(4, DIM, 1.0, HEADS, cache_config=CacheConfig(block_size=BLOCK), prefix=name)
            layer.kv_cache = cache
    return config


def namespace_of(changes=None, cache=None):
    arguments = from_vllm_config(with_layers(engine_config(changes), cache))
    return namespace_for(arguments, model_facts(MODEL), load_settings(**arguments.settings), BLOCK, torch.float32)


def test_an_engine_and_copies_of_its_configuration_have_the_same_arguments_until_it_has_ended():
    config = engine_config()
    arguments = from_vllm_config(config)
    for each in (copy.copy(config), copy.deepcopy(config), replace(config)):
        assert from_vllm_config(each) is arguments
    assert from_vllm_config(engine_config()) is not arguments
    ended = weakref.ref(arguments)
    runtime_for(arguments).refusal = "old"
    del arguments
    gc.collect()
    assert ended() is None
    assert runtime_for(from_vllm_config(config)).refusal is None
    # Under the id of one that has ended a new engine has its own.
    first, second = with_layers(engine_config()), with_layers(engine_config())
    second.kv_transfer_config.engine_id = first.kv_transfer_config.engine_id
    held = from_vllm_config(first)
    assert from_vllm_config(second) is not held


def test_everything_of_the_namespace_is_known_and_two_engines_agree():
    first, second = namespace_of(), namespace_of()
    assert (unknown_fields(first), first) == ([], second)
    backend = "TRITON_ATTN" if torch.cuda.is_available() else "CPU_ATTN"  # FlashAttention does not take float32
    assert first.backend_cache_layout == f"vllm-{'.'.join(vllm.__version__.split('.')[:2])}/{backend}/0.1.2.3"
    assert is_content(first.model_revision)
    # vLLM's own code alone puts channels into another order.
    others = engine_config({"model_config.model_impl": "transformers"})
    assert [from_vllm_config(each).halved_model_types for each in (engine_config(), others)] == [LLAMA4, ()]
    assert (first.cache_dtype, first.kv_dtype, first.extra["compute_dtype"]) == ("auto", "float32", "float32")


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"model_config.dtype": torch.bfloat16}, None),
        ({"cache_config.cache_dtype": "fp8"}, None),
        ({"model_config.quantization_config": {"linear": "fp8"}}, None),
        ({"parallel_config.tensor_parallel_size": 2}, None),
        ({"parallel_config.pipeline_parallel_size": 2}, None),
        # vLLM has no attention of a card for it in float32.
        *[({"parallel_config.prefill_context_parallel_size": 2}, None)] * (not torch.cuda.is_available()),
        ({"model_config.model_impl": "transformers"}, None),
        ({"model_config.hf_text_config.attn_temperature_tuning": True}, None),
        ({"load_config.load_format": "dummy"}, "model_revision"),
        ({"load_config.load_format": "a plugin's"}, "model_revision"),
        ({"load_config.model_loader_extra_config": {"a": 1}}, "model_revision"),
        ({"model_config.dtype": None}, "extra"),
        ({"cache_config.cache_dtype": None}, "cache_dtype"),
        ({"parallel_config.tensor_parallel_size": "two"}, "tensor_parallel"),
        ({"model_config.quantization_config": SimpleNamespace()}, "extra"),
    ],
    ids=str,
)
def test_what_changes_the_kv_makes_another_namespace_and_what_is_not_known_matches_nothing(changes, unknown):
    other = namespace_of(changes)
    assert (unknown_fields(other) == []) if unknown is None else (unknown in unknown_fields(other))
    assert other.key != namespace_of({} if unknown is None else changes).key


def test_caches_of_another_order_are_another_engine_and_unallocated_ones_are_unknown():
    turned = torch.empty(4, BLOCK, HEADS, 2 * DIM).transpose(1, 2)
    assert namespace_of(cache=turned).backend_cache_layout.endswith("/0.2.1.3")
    assert is_unknown(namespace_of(cache=torch.empty(0)).backend_cache_layout)
    assert from_vllm_config(engine_config()).read_caches().layout is None
    layers = (config := with_layers(engine_config())).compilation_config.static_forward_context
    backend = layers["model.layers.0"].attn_backend
    layers["model.layers.1"].attn_backend = type("Other", (backend,), {"get_name": staticmethod(lambda: "OTHER")})
    assert from_vllm_config(config).read_caches().layout is None


@pytest.mark.parametrize(
    ("text", "version"), [("0.28.1", (0, 28)), ("0.32.0rc1+cpu", (0, 32)), ("1.0", (1, 0)), ("dev", None), (None, None)]
)
def test_versions(monkeypatch, text, version):
    monkeypatch.setattr(vllm, "__version__", text)
    assert vllm_version() == version
    assert (from_vllm_config(with_layers(engine_config())).read_caches().layout is None) is (version is None)


@pytest.mark.promise("engines", "Keys of vLLM's `kv_connector_extra_config` are the...")
@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"semblend_host_bytes": "1073741824"}, "host_bytes", 1 << 30),
        ({"SEMBLEND_HOST_BYTES": 1e9}, "host_bytes", 10**9),
        ({"trtllm_semblend_min_span": 128}, "min_span_tokens", 128),
        ({"semblend_min_span_tokens": 128}, "min_span_tokens", 128),
        ({"semblend_trtllm_audit_path": "/a"}, "audit_path", Path("/a")),
        ({"metrics": False}, "metrics", False),
        ({"policy": "exact"}, "policy", ReusePolicy.EXACT),
        ({"donor_tenant": 7}, "donor_tenant", "7"),
        ({"profile": "/p.json"}, "profile_path", Path("/p.json")),
        # Of the older connector.
        ({"min_semantic_span": 512}, "min_span_tokens", 512),
        ({"min_semantic_span": 512, "min_span": 96}, "min_span_tokens", 96),
        ({"kv_storage_path": "/kv", "disk_bytes": 9}, "disk_path", Path("/kv")),
        ({"mode": "discovery_only"}, "discovery_only", True),
        ({"mode": "exact_prefix"}, "policy", ReusePolicy.EXACT),
        ({"min_similarity": 0.7, "min_reuse_ratio": 0.5}, "min_similarity", 0.7),
        # The environment gives another value.
        ({"max_donors": 96}, "max_donors", 96),
    ],
)
def test_a_key_is_a_setting_whatever_type_its_value_has(monkeypatch, caplog, extra, field, value):
    monkeypatch.setenv("SEMBLEND_MAX_DONORS", "3")
    assert getattr(load_settings(**settings_of(extra)), field) == value
    assert not caplog.records


@pytest.mark.promise(
    "engines",
    "Keys of vLLM's `kv_connector_extra_config` are the settings; those of the older connector are understood",
)
def test_every_setting_can_be_given_by_its_variable_in_lower_case():
    given = {variables_of(name)[1].lower(): "x" for name in Settings.model_fields}
    assert set(settings_of(given)) == set(Settings.model_fields)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_an_empty_value_counts_as_unset(value):
    assert settings_of({"audit_path": value, "nonsense": value}) == {}


def own_records(caplog):
    """Without the copies for vLLM's log, which pytest reads too."""
    return [each for each in caplog.records if not each.getMessage().startswith("semblend: ")]


def test_removed_keys_are_told_in_one_warning_and_unknown_ones_in_another(caplog):
    old = {"kv_storage_path": "/kv", "donor_dtype": 1}
    assert settings_of({**old, "mode": "x", "host_byte": 1, "\x1b[31m" + "n" * 99: 1}) == {"disk_path": "/kv"}
    removed, unknown = (record.getMessage() for record in own_records(caplog))
    assert all(f"{key}: " in removed for key in old)
    assert "disk_bytes" in removed
    assert "'mode'" in unknown
    assert "'host_byte' (did you mean host_bytes?)" in unknown
    assert "\x1b" not in unknown
    assert "n" * 65 not in unknown


@pytest.mark.promise("engines", "vLLM starts with any settings; what...")
@pytest.mark.parametrize(
    "extra",
    [
        {"host_bytes": -1},
        {"host_bytes": "much"},
        {"host_bytes": True},
        {"audit_path": {"a": 1}},
        {"min_reuse_ratio": float("nan")},
        {"min_span": 64, "min_span_tokens": 65},
        {},
    ],
    ids=str,
)
def test_a_value_out_of_range_turns_reuse_off_with_one_sentence(caplog, monkeypatch, extra):
    """A variable's, too."""
    monkeypatch.setenv("SEMBLEND_HOST_BYTES", "1073741824" if extra else "much")
    arguments = from_vllm_config(engine_config(**extra))
    assert arguments.refusal == "settings_invalid"
    (told,) = (record for record in own_records(caplog) if record.levelno == logging.ERROR)
    named = next(iter(extra), "SEMBLEND_HOST_BYTES").replace("min_span", "min_span_tokens")
    assert named in told.getMessage()
    # The halves can be built, and the reason that counts is settings_invalid.
    assert set(arguments.settings) == set(settings_off()) == set(Settings.model_fields)
    assert load_settings(**arguments.settings).enabled
