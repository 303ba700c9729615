"""The namespace changes with everything that changes KV; what is unknown matches nothing."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.rope import still
from semblend_trt.config import Settings
from semblend_trt.connector.lookup import namespace_for
from semblend_trt.connector.model_facts import model_facts
from tests.semblend_trt.engine_specs import known_engine
from tests.semblend_trt.samples import unknown_fields


def namespace_of(model, settings=None, block_size=32, pool_dtype=torch.bfloat16, **args):
    facts, own = model_facts(model), Settings(**(settings or {}))
    return namespace_for(known_engine(model, **args), facts, own, block_size, pool_dtype)


def test_layers_that_differ_make_another_namespace(tiny_qwen2_path):
    facts = model_facts(tiny_qwen2_path)
    group = facts.groups[0]
    first, rest = replace(group, layers=group.layers[:1]), replace(group, layers=group.layers[1:])
    none = replace(first, rotation=still(first.rotation.rotary_dim))
    window, wider = (replace(first, attention="window", window=tokens) for tokens in (64, 128))

    def key(*groups):
        own = replace(facts, groups=groups)
        return namespace_for(known_engine(tiny_qwen2_path), own, Settings(), 32, torch.bfloat16).key

    assert key(group) == namespace_of(tiny_qwen2_path).key
    every = [(group,), (none, rest), (window, rest), (wider, rest), (replace(group, attention="window", window=64),)]
    assert len({key(*groups) for groups in every}) == len(every)


@pytest.mark.promise("reuse", "The same files are the same model under any name")
@pytest.mark.parametrize("renamed", [False, True])
def test_the_same_files_are_the_same_model_under_any_name(tiny_qwen2_path, tmp_path, renamed):
    copy = tmp_path / ("renamed" if renamed else tiny_qwen2_path.name)
    shutil.copytree(tiny_qwen2_path, copy)
    there = namespace_of(copy)
    assert there.key == namespace_of(tiny_qwen2_path).key
    assert (there.model, there.tokenizer) == (copy.name, copy.name)


@pytest.mark.promise(
    "reuse",
    "The namespace holds every byte of the weights, the configuration, the tokenizer, dtypes, RoPE, layout and "
    "adapters",
)
@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 16},
        {"pool_dtype": torch.float16},
        *({"settings": {f"donor_{name}": "t"}} for name in ("tenant", "template")),
        *({"settings": {name: "r"}} for name in ("adapter_id", "model_revision", "tokenizer_revision")),
        {"dtype": "float16"},
        {"attn_backend": "FLASHINFER"},
        *({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "context")),
        {"kv_cache_config": SimpleNamespace(dtype="fp8")},
        {"quant_config": SimpleNamespace(quant_algo="FP8")},
        {"quant_config": SimpleNamespace(quant_algo=None, kv_cache_quant_algo="FP8")},
    ],
    ids=str,
)
def test_each_field_makes_another_namespace(tiny_qwen2_path, changes):
    base, other = namespace_of(tiny_qwen2_path), namespace_of(tiny_qwen2_path, **changes)
    assert base == namespace_of(tiny_qwen2_path)
    assert unknown_fields(base) == unknown_fields(other) == []
    assert other.key != base.key


def test_quantisation_binds_in_full_and_none_at_all_is_none_however_it_is_said(tiny_qwen2_path):
    said = [SimpleNamespace(quant_algo=algorithm, group_size=size) for algorithm in ("FP8", None) for size in (64, 128)]
    keys = [namespace_of(tiny_qwen2_path, quant_config=asked).key for asked in said]
    assert len(set(keys)) == 3
    assert keys[2] == keys[3] == namespace_of(tiny_qwen2_path).key


@pytest.mark.promise("reuse", "The namespace holds every byte of...")
def test_another_tokenizer_and_each_tensor_make_another_namespace(tiny_qwen2_path, tmp_path):
    tuned = tmp_path / tiny_qwen2_path.name
    shutil.copytree(tiny_qwen2_path, tuned)
    (tuned / "tokenizer.json").write_text((tuned / "tokenizer.json").read_text() + "\n")
    assert namespace_of(tuned).tokenizer_revision != namespace_of(tiny_qwen2_path).tokenizer_revision
    tensors = load_file(tuned / "model.safetensors")
    keys = {namespace_of(tuned).key}
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1e-6 + changed.view(-1)[-1].abs()
        save_file({**tensors, name: changed}, tuned / "model.safetensors", metadata={"format": "pt"})
        keys.add(namespace_of(tuned).key)
    assert len(tensors) > 30
    assert len(keys) == len(tensors) + 1


@pytest.mark.promise("reuse", "The namespace holds every byte of...")
def test_the_configuration_binds_and_what_is_said_of_generation_does_not(tiny_qwen2_path, tmp_path):
    copy = tmp_path / tiny_qwen2_path.name
    shutil.copytree(tiny_qwen2_path, copy)
    base, config = namespace_of(copy), json.loads((copy / "config.json").read_text())

    def key_with(**changes):
        (copy / "config.json").write_text(json.dumps(dict(reversed({**config, **changes}.items()))))
        return namespace_of(copy).key

    assert key_with() == base.key
    binding = [
        *({"rms_norm_eps": 0.05}, {"hidden_act": "gelu"}, {"initializer_range": 0.5}),
        *({"a_field_of_the_future": {"nested": [1, {"deep": value}]}} for value in (2, 3)),
    ]
    assert len({key_with(**changes) for changes in binding} - {base.key}) == len(binding)
    harmless = {"eos_token_id": 7, "transformers_version": "9.9.9", "use_cache": False, "_name_or_path": "elsewhere"}
    assert key_with(**harmless) == base.key
    (copy / "generation_config.json").write_text('{"temperature": 0.1}')
    assert key_with() == base.key
    (copy / "quantize_config.json").write_text('{"bits": 4}')
    assert key_with() != base.key


def test_adapters_of_the_engine_bind_by_their_content(tiny_qwen2_path, tmp_path):
    adapter = tmp_path / "legal"
    adapter.mkdir()
    seen = {namespace_of(tiny_qwen2_path).key}
    lora_config = SimpleNamespace(lora_dir=[str(adapter)])
    for content in (b"a", b"b"):
        (adapter / "adapter_model.safetensors").write_bytes(content)
        seen.add(namespace_of(tiny_qwen2_path, lora_config=lora_config).key)
    assert len(seen) == 3
    (adapter / "adapter_model.safetensors").unlink()
    assert unknown_fields(namespace_of(tiny_qwen2_path, lora_config=lora_config)) == ["extra"]


@pytest.mark.promise("reuse", "What cannot be determined matches no...")
@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"load_format": "dummy"}, "model_revision"),
        ({"checkpoint_loader": object()}, "model_revision"),
        ({"quant_config": SimpleNamespace(quant_algo="FP8", kind=object())}, "extra"),
        ({"tokenizer": object()}, "tokenizer"),
        ({"tokenizer": "/no/such/tokenizer"}, "tokenizer_revision"),
        ({"tokenizer": "semblend-test-org/no-such-model-on-this-machine"}, "tokenizer_revision"),
        ({"tensor_parallel_size": None}, "tensor_parallel"),
        ({"kv_cache_config": None}, "cache_dtype"),
        ({"dtype": None}, "extra"),
    ],
)
def test_what_is_unknown_matches_nothing(tiny_qwen2_path, changes, unknown):
    facts, args = model_facts(tiny_qwen2_path), known_engine(tiny_qwen2_path, **changes)
    first, second = (namespace_for(args, facts, Settings(), 32, torch.float32) for _ in range(2))
    assert unknown in unknown_fields(first)
    assert first.key != second.key


def test_a_model_without_weights_or_tokenizer_matches_nothing(tiny_qwen2_path, tmp_path):
    shutil.copy(tiny_qwen2_path / "config.json", tmp_path)
    assert set(unknown_fields(namespace_of(tmp_path))) == {"model_revision", "tokenizer_revision"}


def test_a_tokenizer_object_is_known_by_where_it_came_from(tiny_qwen2_path):
    by_object = namespace_of(tiny_qwen2_path, tokenizer=SimpleNamespace(name_or_path=str(tiny_qwen2_path)))
    assert by_object.key == namespace_of(tiny_qwen2_path).key
