"""Gemma 3's facts: full attention and windows have a RoPE each, in every form; images are no obstacle to its text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, Gemma3Config, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from semblend_trt.connector.model_facts import _of_attention, model_facts
from semblend_trt.connector.rope_config import rope_parameters
from semblend_trt.errors import UnsupportedModelError

TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 32,
    "sliding_window": 512,
    "max_position_embeddings": 4096,
}
WITH_IMAGES: dict[str, Any] = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
LINEAR = {"rope_type": "linear", "factor": 8.0}
NESTED = {
    "full_attention": {**LINEAR, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
FORMS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "old": {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
    "as published": {"rope_scaling": LINEAR, "sliding_window_pattern": 6},
    "as published of 1b": {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None},
    "new": {"rope_parameters": NESTED},
    "both": {"rope_parameters": NESTED, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
    "another pattern": {"sliding_window_pattern": 3, "rope_local_base_freq": 1e5},
    "one theta for all": {"rope_theta": 1e4, "rope_local_base_freq": 1e4},
}


def facts_of(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return model_facts(folder)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_images", [False, True])
def test_each_attention_has_the_models_own_rotation_and_window(tmp_path, form, has_images):
    text = TEXT | FORMS[form]
    config = {**WITH_IMAGES, "text_config": text, "vision_config": {}} if has_images else text
    facts = facts_of(tmp_path, config)
    read = AutoConfig.from_pretrained(tmp_path)
    read = read.text_config if has_images else read
    rotary = Gemma3RotaryEmbedding(read)
    for layer, kind in enumerate(read.layer_types):
        own = getattr(rotary, f"{kind}_inv_freq").double().tolist()
        assert facts.rotation.of_layer(layer).inverse_frequencies == tuple(own)
        assert facts.windows[layer] == (None if kind == "full_attention" else 512)
    assert facts.model_type == config["model_type"]
    assert (facts.num_layers, facts.num_heads, facts.kv_heads, facts.head_dim) == (7, 4, 2, 32)
    assert facts.rope_parameters == read.rope_parameters["full_attention"]


def test_the_classes_of_transformers_write_what_is_read(tmp_path):
    text = Gemma3TextConfig(**TEXT, rope_parameters=NESTED)
    text.save_pretrained(tmp_path)
    alone = model_facts(tmp_path)
    Gemma3Config(text_config=text.to_dict(), architectures=WITH_IMAGES["architectures"]).save_pretrained(tmp_path)
    assert model_facts(tmp_path).groups == alone.groups
    assert len(alone.groups) == 2


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("attention_layout", {**TEXT, "use_bidirectional_attention": True}),
    ("attention_layout", {**TEXT, "attn_logit_softcapping": 50.0}),
    ("sliding_window", {**TEXT, "num_hidden_layers": 3}),  # a window in all of them
    ("rope_unknown", {**TEXT, "rope_parameters": NESTED, "rope_theta": 1e4}),
    ("rope_unknown", {**TEXT, "rope_parameters": NESTED, "rope_local_base_freq": 1e4}),
    # Transformers 5 reads it as no scaling, and Transformers 4 as one.
    ("rope_unknown", {**TEXT, "rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("rope_dynamic", {**TEXT, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("rope_partial", {**TEXT, "rope_parameters": {**NESTED, "sliding_attention": {"partial_rotary_factor": 0.5}}}),
    ("unknown_architecture", {**TEXT, "architectures": ["Gemma3TextModel"]}),
    ("unknown_architecture", {**WITH_IMAGES, "architectures": ["Gemma3Model"], "text_config": TEXT}),
    ("unknown_architecture", {**WITH_IMAGES, "auto_map": {"AutoModelForCausalLM": "own.Own"}, "text_config": TEXT}),
    ("unknown_model_type", {**WITH_IMAGES, "text_config": {**TEXT, "model_type": "gemma2"}}),
    ("unknown_model_type", {**WITH_IMAGES}),
    ("attention_layout", {**WITH_IMAGES, "text_config": {**TEXT, "use_bidirectional_attention": True}}),
    ("multimodal", {**WITH_IMAGES, "model_type": "paligemma", "text_config": TEXT}),
]


@pytest.mark.parametrize(("reason", "config"), REFUSED)
def test_other_ones_are_refused_by_name(tmp_path, reason, config):
    with pytest.raises(UnsupportedModelError) as refused:
        facts_of(tmp_path, config)
    assert refused.value.reason == reason
    assert "\n" not in str(refused.value)


def test_an_object_of_transformers_4_is_read_as_one_of_5():
    raw = FORMS["old"]
    config = SimpleNamespace(**raw, rope_parameters=None)
    full, window = (rope_parameters(*_of_attention(f"{kind}_attention", raw, config)) for kind in ("full", "sliding"))
    assert full == {**LINEAR, "rope_theta": 1e6}
    assert window == {"rope_type": "default", "rope_theta": 2e4}
