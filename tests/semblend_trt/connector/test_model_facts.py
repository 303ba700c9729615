"""Facts equal what the model itself uses; what cannot be moved safely is refused by name."""

import copy
import importlib
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from semblend_trt.connector.attention_layout import rope_parameters, rope_rotation
from semblend_trt.connector.model_facts import HARMLESS_FIELDS, _of_attention, model_facts
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from tests.pages import Page, code_in
from tests.semblend_trt.engine_specs import change_config, facts_of, sizes

SMALL = sizes(3, hidden_size=256, vocab_size=64)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


def rope(rope_type, theta=1e6, **more):
    return {"rope_type": rope_type, "rope_theta": theta, **more}


def of_type(model_type, **changes):
    return AutoConfig.for_model(model_type, **SMALL | changes)


SUPPORTED = {
    "qwen2": of_type("qwen2", rope_parameters=rope("default")),
    "qwen2_yarn": of_type("qwen2", rope_parameters=rope("yarn", **YARN)),
    "qwen3": of_type("qwen3", head_dim=128, rope_parameters=rope("default")),
    "qwen3_yarn": of_type("qwen3", head_dim=32, rope_parameters=rope("yarn", **YARN)),
    "llama": of_type("llama", rope_parameters=rope("default", 1e4)),
    "llama3": of_type("llama", rope_parameters=rope("llama3", 5e5, **LLAMA3)),
    "mistral": of_type("mistral", sliding_window=None, rope_parameters=rope("default")),
    "mixtral": of_type("mixtral", rope_parameters=rope("default")),
    "qwen3_moe": of_type("qwen3_moe", head_dim=128, rope_parameters=rope("yarn", **YARN)),
    "glm4_moe": of_type("glm4_moe", head_dim=128, rope_parameters=rope("default")),
    "glm4_moe_yarn": of_type("glm4_moe", head_dim=64, rope_parameters=rope("yarn", partial_rotary_factor=0.25, **YARN)),
    "smollm3_rope_in_all": of_type("smollm3", no_rope_layers=[1, 1, 1]),
    "granite": of_type("granite", rope_parameters=rope("default", 5e6)),
    "olmo2": of_type("olmo2", rope_parameters=rope("default", 5e5)),
    "gpt_oss": of_type("gpt_oss", head_dim=64),
    "phi3_partial": of_type("phi3", pad_token_id=0, rope_parameters=rope("default", 1e4, partial_rotary_factor=0.5)),
}


def own_frequencies(config):
    """Those of the rotary embedding in the model's own code."""
    code = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    kinds = [kind for name, kind in vars(code).items() if name.endswith("RotaryEmbedding")]
    (rotary,) = (kind for kind in kinds if kind.__module__ == code.__name__)
    return tuple(rotary(config).inv_freq.double().tolist())


def write_config(folder, config, **changes):
    """Saves `config` and then lays `changes` over its file."""
    config.save_pretrained(folder)
    change_config(folder, **changes)
    return folder


@pytest.mark.promise(
    "engines",
    "Supported are Gemma 3, GLM-4.5, gpt-oss, Granite 3, Llama up to 4, Mistral, Mixtral, OLMo-2, Phi-3, Qwen2, "
    "Qwen3, Qwen3-MoE and SmolLM3, with RoPE of type default, linear, llama3 and yarn",
)
@pytest.mark.known_defect(5)
@pytest.mark.parametrize("name", SUPPORTED)
def test_the_rotation_is_the_models_own(tmp_path, name):
    config = SUPPORTED[name]
    facts = model_facts(str(write_config(tmp_path, config)))
    own = own_frequencies(AutoConfig.from_pretrained(tmp_path))
    assert facts.rotation.inverse_frequencies == own
    assert (facts.rotation.rotary_dim, facts.rotation.interleaved) == (2 * len(own), False)
    assert (facts.num_layers, facts.num_heads, facts.kv_heads, facts.max_positions) == (3, 4, 2, 4096)
    assert facts.head_dim == (getattr(config, "head_dim", None) or 64)
    assert facts.windows == ((128, None, 128) if name == "gpt_oss" else (None, None, None))
    assert facts.lowest_check_layer == (2 if name == "gpt_oss" else 1)
    assert (facts.model_type, facts.quantization) == (config.model_type, None)
    assert facts.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]


@pytest.mark.promise("engines", "Each layer's keys move by its...")
@pytest.mark.parametrize(
    ("given", "turning"),
    [
        ({}, [1, 1, 1, 0, 1, 1, 1, 0, 1]),
        ({"no_rope_layer_interval": 2}, [1, 0, 1, 0, 1, 0, 1, 0, 1]),
        ({"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 1, 0]}, [0, 1, 1, 1, 1, 1, 1, 1, 0]),
        ({"no_rope_layers": [0] * 9}, [0] * 9),
    ],
    ids=str,
)
def test_layers_without_rope_do_not_turn(tmp_path, given, turning):
    config = of_type("smollm3", num_hidden_layers=9, pad_token_id=None, **given)
    facts = model_facts(write_config(tmp_path, config))
    with torch.device("meta"):
        layers = AutoModel.from_config(config).layers
    assert [layer.self_attn.use_rope for layer in layers] == turning
    assert [int(not facts.rotation.of_layer(layer).is_still) for layer in range(9)] == turning
    turned = {facts.rotation.of_layer(layer).inverse_frequencies for layer in range(9) if turning[layer]}
    assert turned <= {own_frequencies(config)}
    assert {group.attention for group in facts.groups} == {"full"}


@pytest.mark.known_defect(7)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "hidden", "head_dim"),
    [(12, 2, 1536, 128), (28, 4, 3584, 128), (32, 8, 4096, 128), (32, 8, 2048, 64)],
    ids=["Qwen2.5-1.5B", "Qwen2.5-7B", "Llama-3-8B", "Llama-3.2-1B"],
)
def test_head_dim_of_the_shapes_that_a_guess_gets_wrong(tmp_path, heads, kv_heads, hidden, head_dim):
    config = of_type("qwen2", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=hidden)
    facts = model_facts(write_config(tmp_path, config))
    assert (facts.head_dim, facts.kv_heads, facts.rotation.rotary_dim) == (head_dim, kv_heads, head_dim)


QWEN2, LLAMA, MISTRAL, PHI3, QWEN3_MOE, GPT_OSS = (
    SUPPORTED[name] for name in ("qwen2", "llama", "mistral", "phi3_partial", "qwen3_moe", "gpt_oss")
)
SMOLLM3 = of_type("smollm3")
WINDOW = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1, "layer_types": None}
LONGROPE = rope("longrope", partial_rotary_factor=1.0, short_factor=[1.0] * 32, long_factor=[2.0] * 32)
PER_LAYER = {"full_attention": rope("default"), "sliding_attention": rope("default")}
NOPE = {"no_rope_layers": [1, 0, 1]}
FP8_KV = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
OWN_CODE = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
REFUSED = [
    ("unknown_model_type", LLAMA, {"model_type": "gemma"}),
    ("unknown_model_type", LLAMA, {"model_type": None}),
    ("unknown_architecture", LLAMA, {"architectures": ["OtherForCausalLM"]}),
    ("unknown_architecture", LLAMA, {"auto_map": OWN_CODE}),
    ("mla", LLAMA, {"model_type": "deepseek_v2", "kv_lora_rank": 512}),
    ("multimodal", QWEN2, {"model_type": "qwen2_vl", "vision_config": {}}),
    ("sliding_window", MISTRAL, {"sliding_window": 1024}),
    ("sliding_window", QWEN2, WINDOW),
    ("sliding_window", PHI3, {"sliding_window": 2047}),
    ("sliding_window", QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 512}),
    ("sliding_window", GPT_OSS, {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    ("attention_layout", GPT_OSS, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("rope_unknown", GPT_OSS, {"rope_parameters": rope("default", 1e4)}),
    ("sliding_window", SMOLLM3, {"use_sliding_window": True, "sliding_window": 64, "layer_types": None} | NOPE),
    ("rope_per_layer", SMOLLM3, {"no_rope_layers": [1, 1]}),
    ("rope_per_layer", SMOLLM3, {"no_rope_layers": [1, 1, 2]}),
    ("attention_layout", QWEN2, {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
    ("attention_layout", QWEN2, {"is_causal": False}),
    ("attention_layout", LLAMA, {"use_bidirectional_attention": True}),
    ("attention_layout", QWEN3_MOE, {"dual_chunk_attention_config": {"chunk_size": 262144}}),
    ("rope_dynamic", LLAMA, {"rope_parameters": rope("dynamic", factor=2.0)}),
    ("rope_longrope", PHI3, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024}),
    ("rope_multimodal", QWEN2, {"rope_parameters": rope("default", mrope_section=[16, 8, 8])}),
    ("rope_multimodal", QWEN2, {"rope_parameters": None, "rope_scaling": {"type": "mrope"}}),
    ("rope_per_layer", LLAMA, {"rope_parameters": PER_LAYER}),
    ("rope_partial", LLAMA, {"rope_parameters": rope("default", partial_rotary_factor=0.5)}),
    ("rope_partial", LLAMA, {"partial_rotary_factor": 0.5}),
    ("geometry", LLAMA, {"num_key_value_heads": 3}),
    ("geometry", QWEN2, {"num_attention_heads": 0}),
    ("kv_quantized", LLAMA, {"quantization_config": FP8_KV}),
]


def test_a_modelopt_checkpoint_is_read_from_its_own_file(tmp_path):
    write_config(tmp_path, LLAMA)
    own = tmp_path / "hf_quant_config.json"
    own.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}))
    assert (model_facts(tmp_path).quantization or "").startswith("FP8:")
    asked = ({"quant_method": method, "bits": bits} for method, bits in (("awq", 4), ("awq", 8), ("gptq", 4)))
    assert (
        len({model_facts(write_config(tmp_path, LLAMA, quantization_config=each)).quantization for each in asked}) == 3
    )
    own.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}))
    with pytest.raises(UnsupportedModelError, match="KV cache is quantised") as refused:
        model_facts(tmp_path)
    assert refused.value.reason == "kv_quantized"
    # An engine that tells the scales may keep its KV so.
    assert model_facts(tmp_path, None, tells_kv_scales=True).quantization not in (None, "FP8")
    own.write_text("not json")
    with pytest.raises(ConfigurationError, match=r"hf_quant_config\.json cannot be read"):
        model_facts(tmp_path)


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "a/b/c", "", "../x", Path("a-file")])
def test_an_unknown_path_is_one_clear_sentence(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")  # and nothing else lies beside it
    with pytest.raises(ConfigurationError, match="neither a directory that exists nor a hub id") as refused:
        model_facts(model)
    assert repr(str(model)) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "has no config.json"),
        ("{", "not a valid JSON file"),
        ("[]", "has no config.json|cannot be read, mend it"),  # as the version of Transformers has it
        ("[1]", "cannot be read, mend it"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "'hidden_size'"),
    ],
)
def test_an_unreadable_configuration_is_one_clear_sentence(tmp_path, content, told):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=told) as refused:
        model_facts(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_page_names_every_field_that_is_left_out():
    (told,) = (
        text for text in Page("docs/failure-modes.md").paragraphs if text.startswith("Left out of `config.json`")
    )
    assert set(code_in(told)) - {"config.json", "generation_config.json"} == HARMLESS_FIELDS


SIZES = {**SMALL, "pad_token_id": 0, "model_type": "llama"}
OLD_LLAMA3 = {"rope_type": "llama3", **LLAMA3}
OLD_YARN = {"rope_type": "yarn", **YARN}
OLD_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
# The fields of a configuration as Transformers 4 writes them.
OLD = {
    "default": {"rope_theta": 1e6, "rope_scaling": None},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": OLD_LLAMA3},
    "yarn": {"rope_theta": 1e6, "rope_scaling": OLD_YARN},
    "yarn_betas": {"rope_theta": 1e6, "rope_scaling": {**OLD_YARN, "beta_fast": 24, "beta_slow": 2, "truncate": True}},
    "yarn_not_truncated": {"rope_theta": 150000.0, "rope_scaling": {**OLD_YARN, "truncate": False}},
}


def new_form(old):
    parameters = {"rope_theta": old["rope_theta"], **(old["rope_scaling"] or {})}
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type", "default")
    return {"rope_parameters": parameters}


@pytest.mark.promise(
    "engines", "The connector works with Transformers 4 and 5; the embedded engine says that it needs 5"
)
@pytest.mark.parametrize("old", [{}, *OLD.values()])
def test_the_old_form_gives_the_rotation_of_the_model(tmp_path, old):
    """With equal parameters the namespace is equal too, so that donors outlive an upgrade."""
    facts = facts_of(tmp_path, SIZES | old)
    assert facts.rotation.inverse_frequencies == own_frequencies(AutoConfig.from_pretrained(tmp_path))
    if old and version("transformers") >= "5":  # Transformers 4 does not read the form of 5
        new, raw = facts_of(tmp_path, SIZES | new_form(old)), {**SIZES, **copy.deepcopy(old)}
        parameters = rope_parameters(raw, SimpleNamespace(**raw))  # an object of Transformers 4
        assert parameters == new.rope_parameters
        assert rope_rotation(parameters, 64) == new.rotation


@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize("model_type", ["phi3", "glm4_moe"])
def test_a_partial_rotation_in_the_old_form(tmp_path, factor, model_type):
    old = {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": factor}
    facts = facts_of(tmp_path, {**SIZES, **old, "model_type": model_type})
    assert facts.rotation.inverse_frequencies == own_frequencies(AutoConfig.from_pretrained(tmp_path))
    assert facts.rotation.rotary_dim == 64 * factor
    parameters = rope_parameters(old, SimpleNamespace(**old))
    assert parameters == facts.rope_parameters
    assert ("partial_rotary_factor" in parameters) == (factor != 1)


OLD_REFUSED = [
    ("rope_dynamic", {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("rope_longrope", {"rope_theta": 1e4, "rope_scaling": OLD_LONGROPE}),
    ("rope_multimodal", {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}}),
    ("rope_multimodal", {"rope_parameters": rope("default", 1e4), "rope_scaling": {"type": "mrope"}}),
    ("rope_partial", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ("multimodal", {"text_config": {**SIZES, **OLD["default"]}}),
    ("rope_unknown", {"rope_theta": 1e4, **new_form(OLD["default"])}),
    ("rope_unknown", {**OLD["linear"], **new_form(OLD["yarn"])}),
    ("rope_unknown", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("rope_unknown", {"rope_theta": 1e6, "rope_scaling": {**OLD_YARN, "truncate": 0}}),
    ("rope_unknown", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", **OLD_YARN}}),
]


PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize("raw", [PARTIAL, *(new_form(OLD[kind]) for kind in ("default", "linear", "llama3", "yarn"))])
def test_a_form_that_transformers_4_does_not_read_is_refused(raw):
    """It leaves `rope_parameters` as it is and rotates by its defaults, and so does the engine."""
    config = SimpleNamespace(**raw, rope_theta=1e4, rope_scaling=None, partial_rotary_factor=1.0)
    with pytest.raises(UnsupportedModelError, match=r"but Transformers .* reads") as refused:
        rope_parameters(raw, config)
    assert refused.value.reason == "rope_unknown"


@given(
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    values=st.dictionaries(
        st.sampled_from(["rope_theta", "factor", "low_freq_factor", "high_freq_factor", *OLD_YARN]),
        st.sampled_from([None, 0, -1.0, float("nan"), float("inf"), "4", True, [1.0], 1, 0.5, 1e-30]),
        min_size=1,
    ),
)
@settings(max_examples=200)
def test_a_value_that_is_no_number_never_makes_a_rotation(kind, values):
    values = {**OLD_LLAMA3, **OLD_YARN, "rope_theta": 1e6, **values, "rope_type": kind}
    try:
        frequencies = rope_rotation(values, 64).inverse_frequencies
    except UnsupportedModelError as refused:
        reason = refused.reason
    else:
        reason = "rope_unknown"
        assert all(0 <= each < float("inf") for each in frequencies)
        assert isinstance(values["rope_theta"], (int, float))
    assert reason == "rope_unknown"


GEMMA = sizes(7, model_type="gemma3_text", head_dim=32, sliding_window=512)
WITH_IMAGES = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
LINEAR = {"rope_type": "linear", "factor": 8.0}
NESTED = {"full_attention": {**LINEAR, "rope_theta": 5e5}, "sliding_attention": rope("default", 2e4)}
GEMMA_FORMS = {
    "defaults": {},
    "old": {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
    "as published": {"rope_scaling": LINEAR, "sliding_window_pattern": 6},
    "as published of 1b": {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None},
    "new": {"rope_parameters": NESTED},
    "both": {"rope_parameters": NESTED, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
    "another pattern": {"sliding_window_pattern": 3, "rope_local_base_freq": 1e5},
    "one theta for all": {"rope_theta": 1e4, "rope_local_base_freq": 1e4},
}


@pytest.mark.promise(
    "engines",
    "Gemma 3's full attention and windows move by a rotation each; in vLLM answers are those of a cold run, and "
    "with images it is served for text alone",
)
@pytest.mark.parametrize("form", GEMMA_FORMS)
@pytest.mark.parametrize("has_images", [False, True])
def test_each_attention_has_the_models_own_rotation_and_window(tmp_path, form, has_images):
    text = GEMMA | GEMMA_FORMS[form]
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


GEMMA_REFUSED = [
    ("attention_layout", {**GEMMA, "use_bidirectional_attention": True}),
    ("attention_layout", {**GEMMA, "attn_logit_softcapping": 50.0}),
    ("sliding_window", {**GEMMA, "num_hidden_layers": 3}),  # a window in all of them
    ("rope_unknown", {**GEMMA, "rope_parameters": NESTED, "rope_theta": 1e4}),
    ("rope_unknown", {**GEMMA, "rope_parameters": NESTED, "rope_local_base_freq": 1e4}),
    # Transformers 5 reads it as no scaling, and Transformers 4 as one.
    ("rope_unknown", {**GEMMA, "rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("rope_dynamic", {**GEMMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("rope_partial", {**GEMMA, "rope_parameters": {**NESTED, "sliding_attention": {"partial_rotary_factor": 0.5}}}),
    ("unknown_architecture", {**GEMMA, "architectures": ["Gemma3TextModel"]}),
    ("unknown_architecture", {**WITH_IMAGES, "architectures": ["Gemma3Model"], "text_config": GEMMA}),
    ("unknown_architecture", {**WITH_IMAGES, "auto_map": {"AutoModelForCausalLM": "own.Own"}, "text_config": GEMMA}),
    ("unknown_model_type", {**WITH_IMAGES, "text_config": {**GEMMA, "model_type": "gemma2"}}),
    ("unknown_model_type", {**WITH_IMAGES}),
    ("attention_layout", {**WITH_IMAGES, "text_config": {**GEMMA, "use_bidirectional_attention": True}}),
    ("multimodal", {**WITH_IMAGES, "model_type": "paligemma", "text_config": GEMMA}),
]


def test_gemmas_object_of_transformers_4_is_read_as_one_of_5():
    raw = GEMMA_FORMS["old"]
    config = SimpleNamespace(**raw, rope_parameters=None)
    full, window = (rope_parameters(*_of_attention(f"{kind}_attention", raw, config)) for kind in ("full", "sliding"))
    assert full == {**LINEAR, "rope_theta": 1e6}
    assert window == {"rope_type": "default", "rope_theta": 2e4}


@pytest.mark.promise("engines", "Other models, RoPE types, windows, MLA, images and KV dtypes are refused by name")
@pytest.mark.known_defect(25)
@pytest.mark.parametrize(
    ("reason", "base", "changes"),
    [
        *REFUSED,
        *((reason, None, SIZES | fields) for reason, fields in OLD_REFUSED),
        *((reason, None, fields) for reason, fields in GEMMA_REFUSED),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(tmp_path, reason, base, changes):
    (tmp_path / "config.json").write_text(json.dumps(changes))
    with pytest.raises(UnsupportedModelError) as refused:
        model_facts(tmp_path if base is None else write_config(tmp_path, base, **changes))
    assert refused.value.reason == reason
    assert "\n" not in str(refused.value)
