"""Layers are grouped by what they attend to and rotate by, as the models' own code does; a false form is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm, Llama4TextRotaryEmbedding, apply_rotary_emb

from kernels.layout import KvGeometry, LayeredPool
from kernels.rope import RopeRotation, rotate_keys
from semblend_trt.connector.attention_layout import PUBLISHED_CODE, layer_groups
from semblend_trt.connector.eligibility import facts_in_engine, served_facts
from semblend_trt.errors import UnsupportedModelError
from semblend_trt.policy import ReusePolicy
from semblend_trt.pool_facts import geometry_of
from tests.semblend_trt.engine_specs import engine, facts_of, sizes


@pytest.mark.parametrize(
    ("types", "told"),
    [
        (["full_attention", "linear_attention"], r"layer types \['linear_attention'\] are not among full_attention"),
        (["full_attention"], "1 layer types are named for 2 layers"),
    ],
)
def test_layers_that_are_not_known_are_refused(types, told):
    config = SimpleNamespace(num_hidden_layers=2, max_position_embeddings=64, layer_types=types)
    with pytest.raises(UnsupportedModelError, match=told) as refused:
        layer_groups(config, [RopeRotation((1.0, 0.5), 4)] * 2)
    assert refused.value.reason == "attention_layout"


OWN_CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": PUBLISHED_CODE}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.7}
V3 = sizes(3, kv_heads=4, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], auto_map=OWN_CODE)
V3 |= {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
V3 |= {"rope_theta": 10000, "rope_scaling": YARN}
DEFAULT = {"rope_scaling": None}
# Kimi K2's betas are equal.
EQUAL_BETAS = {"rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}}


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2"])
@pytest.mark.parametrize("changes", [{}, DEFAULT, EQUAL_BETAS, {"q_lora_rank": None}], ids=str)
def test_a_layer_has_one_row_of_which_the_last_channels_turn(tmp_path, kind, changes):
    facts = facts_of(tmp_path, V3 | {"model_type": kind} | changes)
    assert (facts.kv_heads, facts.head_dim, facts.kv_factor, facts.num_heads) == (1, 40, 1, 4)
    assert [(group.layers, group.attention, group.window) for group in facts.groups] == [((0, 1, 2), "latent", None)]
    assert (facts.rotation.first_channel, facts.rotation.rotary_dim, facts.rotation.interleaved) == (32, 8, True)
    assert facts.model_type == kind


@pytest.mark.promise(
    "engines",
    "Of latent attention (MLA) as DeepSeek-V3 and Kimi K2 have it, only the channels with a position turn; what "
    "only claims the form is refused with the value",
)
@pytest.mark.parametrize("changes", [{}, DEFAULT, EQUAL_BETAS], ids=str)
def test_rows_turn_as_the_models_keys_do(tmp_path, changes):
    """Transformers turns neighbouring channels, and puts the first of each pair in front afterwards."""
    rotation = facts_of(tmp_path, V3 | changes).rotation
    own = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    keys = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0))

    def at(first):
        cos, sin = own(keys, torch.arange(first, first + 5)[None])
        turned = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(keys, keys, cos, sin)[1]
        return torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)

    latent = torch.randn(1, 1, 5, 32, generator=torch.Generator().manual_seed(1))
    moved = rotate_keys(torch.cat([latent, at(70)], dim=-1), 1300, rotation)
    assert torch.equal(moved[..., :32], latent)
    torch.testing.assert_close(moved[..., 32:], at(1370), rtol=0, atol=2e-4)
    assert float((at(70) - at(1370)).abs().max()) > 0.5


NOT_LATENT = [
    ("geometry", {"kv_lora_rank": None}, "kv_lora_rank None"),
    ("geometry", {"kv_lora_rank": True}, "kv_lora_rank True"),
    ("geometry", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7"),
    ("geometry", {"num_hidden_layers": 0}, "num_hidden_layers 0"),
    ("geometry", {"model_type": "kimi_k2", "kv_lora_rank": ...}, "without kv_lora_rank"),
    ("geometry", {"model_type": "kimi_k2", "rope_theta": ..., "v_head_dim": ...}, "without v_head_dim, rope_theta"),
    ("attention_layout", {"index_topk": 2048}, "index_topk of model type 'deepseek_v3' is 2048: a sparse indexer"),
    ("attention_layout", {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
    ("sliding_window", {"sliding_window": 512}, "sliding_window of model type 'deepseek_v3' is 512"),
    ("rope_unknown", {"rope_interleave": False}, "rope_interleave is False"),
    ("rope_unknown", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "'linear' of latent attention"),
    ("rope_unknown", {"rope_scaling": {**YARN, "apply_yarn_scaling": False}}, "apply_yarn_scaling"),
    ("rope_unknown", {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
    ("rope_unknown", {"rope_scaling": {**YARN, "extrapolation_factor": 0.5}}, "extrapolation_factor of yarn is 0.5"),
    ("rope_partial", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("kv_quantized", {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"bits": 8}}}, "quantised"),
    ("unknown_architecture", {"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
    ("unknown_architecture", {"auto_map": {"AutoModelForCausalLM": "modeling_own.DeepseekV3ForCausalLM"}}, "own"),
    ("mla", {"model_type": "deepseek_v32"}, "deepseek_v32"),
    ("mla", {"model_type": "llama"}, "llama"),
    # Kimi K3's text, most of whose layers are recurrent; and the whole of it.
    ("mla", {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1, 2]}}, "kimi_linear"),
    ("multimodal", {"model_type": "kimi_k3", "kv_lora_rank": ..., "text_config": V3}, "kimi_k3"),
]


def test_pools_of_latent_rows(tmp_path):
    on_one, wanted = facts_of(tmp_path, V3).sizes(1), KvGeometry(3, 1, 40, 16, kv_factor=1)
    assert on_one == facts_of(tmp_path, V3).sizes(2)  # every rank holds all of it
    layers = tuple(torch.zeros(4, 1, 16, 40) for _ in range(3))
    for pool in (torch.zeros(4, 3, 1, 16 * 40), LayeredPool(layers)):
        assert geometry_of(pool, on_one) == wanted
    for unfit in (torch.zeros(4, 3, 2, 16 * 40), LayeredPool(layers, layers), LayeredPool(layers[1:])):
        assert geometry_of(unfit, on_one) is None


SCOUT_ROPE = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
SCOUT_ROPE |= {"high_freq_factor": 1.0, "low_freq_factor": 1.0}
TEXT = sizes(8, max_position_embeddings=65536, model_type="llama4_text", head_dim=32)
TEXT |= {"rope_theta": 500000.0, "rope_scaling": SCOUT_ROPE}
WITH_IMAGES = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
PATTERN = [1, 1, 1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("has_images", [False, True])
def test_layers_with_rope_have_chunks_and_the_others_neither(tmp_path, has_images):
    config = {**WITH_IMAGES, "text_config": TEXT, "vision_config": {}} if has_images else TEXT
    facts = facts_of(tmp_path, config)
    assert [(group.attention, group.window) for group in facts.groups] == [("chunks", 8192), ("full", None)]
    assert facts.chunks == tuple(8192 if each else None for each in PATTERN)
    assert (facts.chunk, facts.lowest_check_layer, set(facts.windows)) == (8192, 4, {None})
    assert [not facts.rotation.of_layer(layer).is_still for layer in range(8)] == [bool(each) for each in PATTERN]
    assert (facts.model_type, facts.takes_images) == (config["model_type"], has_images)


@pytest.mark.promise(
    "engines",
    "Llama 4's layers with chunks turn pairs of neighbouring channels, or halves in vLLM, and its others do not "
    "turn; what only claims the form is refused with the value",
)
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


BY_TURNS = ["chunked_attention", "full_attention"] * 4
NOT_CHUNKED = [
    ("attention_layout", {"layer_types": ["chunked_attention"] * 8}, "do not fit no_rope_layers"),
    ("attention_layout", {"layer_types": ["full_attention"] * 8}, "do not fit no_rope_layers"),
    ("attention_layout", {"layer_types": ["sliding_attention"] * 8, "sliding_window": 64}, "do not fit no_rope_layers"),
    ("attention_layout", {"no_rope_layers": [1] * 8}, "all layers have chunks of 8192"),
    ("attention_layout", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    ("attention_layout", {"attention_chunk_size": None}, "attention_chunk_size is None"),
    ("attention_layout", {"attention_bias": True}, "attention_bias is True"),
    ("rope_per_layer", {"no_rope_layers": [1, 0], "layer_types": BY_TURNS}, "no_rope_layers is [1, 0]; 8 layers need"),
    ("rope_per_layer", {"no_rope_layers": [1, 2] * 4}, "need a 1"),
    ("rope_unknown", {"rope_scaling": {**SCOUT_ROPE, "low_freq_factor": 2.0}}, "low_freq_factor 2 of RoPE is above"),
    ("rope_partial", {"partial_rotary_factor": 0.5}, "0.5"),
    ("unknown_architecture", {"architectures": ["Llama4Model"]}, "Llama4Model"),
]


WHOLE = WITH_IMAGES | {"vision_config": {}}


@pytest.mark.promise("engines", "Of latent attention (MLA) as DeepSeek-V3...")
@pytest.mark.promise("engines", "Llama 4's layers with chunks turn...")
@pytest.mark.parametrize(
    ("reason", "config", "told"),
    [
        *((reason, V3 | changes, told) for reason, changes, told in NOT_LATENT),
        *((reason, TEXT | changes, told) for reason, changes, told in NOT_CHUNKED),
        *((reason, WHOLE | {"text_config": TEXT | changes}, told) for reason, changes, told in NOT_CHUNKED),
    ],
)
def test_what_only_claims_the_form_is_refused_with_the_value(tmp_path, reason, config, told):
    with pytest.raises(UnsupportedModelError) as refused:
        facts_of(tmp_path, config)
    assert refused.value.reason == reason
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("chunk", [8192, 65536])
def test_tensorrt_llm_refuses_it_by_name(tmp_path, chunk):
    facts_of(tmp_path, TEXT | {"attention_chunk_size": chunk})
    with pytest.raises(UnsupportedModelError, match="llama4_text has layers with chunks, over which no") as refused:
        served_facts(engine(tmp_path), ReusePolicy.EXACT)
    assert refused.value.reason == "attention_layout"
