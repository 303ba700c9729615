"""Llama 4: its layers with chunks and RoPE and those with neither are told as its own code has them, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm, Llama4TextRotaryEmbedding, apply_rotary_emb

from kernels.rope import rotate_keys
from semblend_trt.connector.eligibility import facts_in_engine, served_facts
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import UnsupportedModelError
from semblend_trt.policy import ReusePolicy
from tests.semblend_trt.engine_specs import engine

SCOUT_ROPE = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
SCOUT_ROPE |= {"high_freq_factor": 1.0, "low_freq_factor": 1.0}
TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 65536,
    "rope_theta": 500000.0,
    "rope_scaling": SCOUT_ROPE,
}
WITH_IMAGES: dict[str, Any] = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
PATTERN = [1, 1, 1, 0, 1, 1, 1, 0]


def facts_of(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return model_facts(folder)


@pytest.mark.parametrize("has_images", [False, True])
def test_layers_with_rope_have_chunks_and_the_others_neither(tmp_path, has_images):
    config = {**WITH_IMAGES, "text_config": TEXT, "vision_config": {}} if has_images else TEXT
    facts = facts_of(tmp_path, config)
    assert [(group.attention, group.window) for group in facts.groups] == [("chunks", 8192), ("full", None)]
    assert facts.chunks == tuple(8192 if each else None for each in PATTERN)
    assert (facts.chunk, facts.lowest_check_layer, set(facts.windows)) == (8192, 4, {None})
    assert [not facts.rotation.of_layer(layer).is_still for layer in range(8)] == [bool(each) for each in PATTERN]
    assert (facts.model_type, facts.takes_images) == (config["model_type"], has_images)


@pytest.mark.parametrize("scaling", [SCOUT_ROPE, {**SCOUT_ROPE, "high_freq_factor": 4.0}, None], ids=str)
def test_a_normed_key_moves_as_its_own_code_places_it(tmp_path, scaling):
    """The norm without weights stands behind the rotation."""
    facts = facts_of(tmp_path, TEXT | {"rope_scaling": scaling})
    rotary, norm = Llama4TextRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)), Llama4TextL2Norm()
    keys = torch.randn(1, 5, 2, 32, generator=torch.Generator().manual_seed(0))  # [1, tokens, heads, channels]

    def placed(first):
        turned = apply_rotary_emb(keys, keys, rotary(keys, torch.arange(first, first + 5)[None]))[1]
        return norm(turned)[0].transpose(0, 1)

    rotation = facts.rotation.of_layer(0)
    torch.testing.assert_close(rotate_keys(placed(11), 700, rotation), placed(711), rtol=1e-4, atol=1e-4)
    # vLLM puts the channels of Q and K into the order of halves.
    (halves,) = {each.interleaved for each in facts_in_engine(facts, VLLM).rotation.kinds}
    moved = rotate_keys(as_halves(placed(11)), 700, facts_in_engine(facts, VLLM).rotation.of_layer(0))
    torch.testing.assert_close(moved, as_halves(placed(711)), rtol=1e-4, atol=1e-4)
    assert (rotation.interleaved, halves) == (True, False)


VLLM = replace(engine(), halved_model_types=("llama4", "llama4_text"))


def as_halves(keys):
    """Neighbouring channels one half of a head apart."""
    return torch.cat([keys[..., 0::2], keys[..., 1::2]], dim=-1)


def test_an_engine_that_computes_as_transformers_does_has_the_same_facts(tmp_path):
    facts = facts_of(tmp_path, TEXT)
    assert facts_in_engine(facts, engine()) is facts
    assert facts_in_engine(facts, replace(engine(), halved_model_types=("llama4",))) is facts


def test_a_chunk_that_holds_all_positions_is_full_attention(tmp_path):
    facts = facts_of(tmp_path, TEXT | {"max_position_embeddings": 8192})
    assert {group.attention for group in facts.groups} == {"full"}
    assert (facts.chunk, facts.lowest_check_layer) == (None, 1)


def test_the_class_of_transformers_writes_what_is_read(tmp_path):
    given = {name: value for name, value in TEXT.items() if name not in ("rope_theta", "rope_scaling")}
    new_form = {**SCOUT_ROPE, "rope_theta": 500000.0}
    Llama4TextConfig(**given, rope_parameters=new_form).save_pretrained(tmp_path)
    written = model_facts(tmp_path)
    assert written.groups == facts_of(tmp_path, TEXT).groups


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("attention_layout", {"layer_types": ["chunked_attention"] * 8}, "do not fit no_rope_layers"),
    ("attention_layout", {"layer_types": ["full_attention"] * 8}, "do not fit no_rope_layers"),
    ("attention_layout", {"layer_types": ["sliding_attention"] * 8, "sliding_window": 64}, "do not fit no_rope_layers"),
    ("attention_layout", {"no_rope_layers": [1] * 8}, "all layers have chunks of 8192"),
    ("attention_layout", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    ("attention_layout", {"attention_chunk_size": -8192}, "attention_chunk_size is -8192"),
    ("attention_layout", {"attention_chunk_size": None}, "attention_chunk_size is None"),
    ("attention_layout", {"attention_bias": True}, "attention_bias is True"),
    (
        "rope_per_layer",
        {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"] * 4},
        r"no_rope_layers is \[1, 0\]; 8 layers need",
    ),
    ("rope_per_layer", {"no_rope_layers": [1, 2] * 4}, "need a 1"),
    ("rope_unknown", {"rope_scaling": {**SCOUT_ROPE, "low_freq_factor": 2.0}}, "low_freq_factor 2 of RoPE is above"),
    ("rope_partial", {"partial_rotary_factor": 0.5}, "0.5"),
    ("unknown_architecture", {"architectures": ["Llama4Model"]}, "Llama4Model"),
]


@pytest.mark.parametrize(("reason", "changes", "told"), REFUSED, ids=str)
@pytest.mark.parametrize("has_images", [False, True])
def test_what_only_claims_the_form_is_refused_by_name(tmp_path, reason, changes, told, has_images):
    text = TEXT | changes
    with pytest.raises(UnsupportedModelError, match=told) as refused:
        facts_of(tmp_path, {**WITH_IMAGES, "text_config": text, "vision_config": {}} if has_images else text)
    assert refused.value.reason == reason
    assert "\n" not in str(refused.value)


def test_chunks_of_another_model_type_are_refused_by_name(tmp_path):
    types = ["chunked_attention", "full_attention"] * 4
    other = {name: value for name, value in TEXT.items() if name != "rope_scaling"}
    with pytest.raises(UnsupportedModelError, match="'qwen2' is not known to have chunks") as refused:
        facts_of(tmp_path, other | {"model_type": "qwen2", "layer_types": types, "attention_chunk_size": 64})
    assert refused.value.reason == "attention_layout"


@pytest.mark.parametrize("chunk", [8192, 65536])
def test_tensorrt_llm_refuses_it_by_name(tmp_path, chunk):
    facts_of(tmp_path, TEXT | {"attention_chunk_size": chunk})
    with pytest.raises(UnsupportedModelError, match="llama4_text has layers with chunks, over which no") as refused:
        served_facts(engine(tmp_path), ReusePolicy.EXACT)
    assert refused.value.reason == "attention_layout"
