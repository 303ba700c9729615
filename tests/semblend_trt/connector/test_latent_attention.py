"""Latent attention: its rows and their rotation are DeepSeek-V3's own, and what only claims the form is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)

from benchmarks.evidence.models import published
from engine_wrapper.embedded.llm_args import LlmArgs
from kernels.layout import KvGeometry, LayeredPool
from kernels.rope import rotate_keys
from semblend_trt.connector import SemBlendKvConnectorWorker
from semblend_trt.connector.attention_layout import PUBLISHED_CODE
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.connector.requests import RequestProgress, SemBlendConnectorMetadata
from semblend_trt.donors.offload import OffloadCommands, SaveIntent
from semblend_trt.errors import UnsupportedModelError
from semblend_trt.plan import EngineMode, PlanSpan
from semblend_trt.pool_facts import geometry_of
from tests.semblend_trt.plans import plan_of

OWN_CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": PUBLISHED_CODE}
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": OWN_CODE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
DEFAULT = {"rope_scaling": None}
# Kimi K2's betas are equal.
EQUAL_BETAS = {"rope_scaling": {**V3["rope_scaling"], "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}}


def facts_of(folder, **changes):
    """Of V3's configuration with changes; one of `...` removes the field."""
    fields = {name: value for name, value in {**V3, **changes}.items() if value is not ...}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return model_facts(folder)


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2"])
@pytest.mark.parametrize("changes", [{}, DEFAULT, EQUAL_BETAS, {"q_lora_rank": None}], ids=str)
def test_a_layer_has_one_row_of_which_the_last_channels_turn(tmp_path, kind, changes):
    facts = facts_of(tmp_path, model_type=kind, **changes)
    assert (facts.kv_heads, facts.head_dim, facts.kv_factor, facts.num_heads) == (1, 40, 1, 4)
    assert [(group.layers, group.attention, group.window) for group in facts.groups] == [((0, 1, 2), "latent", None)]
    assert (facts.rotation.first_channel, facts.rotation.rotary_dim, facts.rotation.interleaved) == (32, 8, True)
    assert facts.model_type == kind


@pytest.mark.parametrize("changes", [{}, DEFAULT, EQUAL_BETAS], ids=str)
def test_rows_turn_as_the_models_keys_do(tmp_path, changes):
    """Transformers turns neighbouring channels, and puts the first of each pair in front afterwards."""
    rotation = facts_of(tmp_path, **changes).rotation
    own = DeepseekV3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    keys = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0))

    def at(first):
        cos, sin = own(keys, torch.arange(first, first + 5)[None])
        turned = apply_rotary_pos_emb_interleave(keys, keys, cos, sin)[1]
        return torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)

    latent = torch.randn(1, 1, 5, 32, generator=torch.Generator().manual_seed(1))
    moved = rotate_keys(torch.cat([latent, at(70)], dim=-1), 1300, rotation)
    assert torch.equal(moved[..., :32], latent)
    torch.testing.assert_close(moved[..., 32:], at(1370), rtol=0, atol=2e-4)
    assert float((at(70) - at(1370)).abs().max()) > 0.5


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct"])
def test_the_published_ones_cache_576_values_a_token_and_layer(tmp_path, name):
    (model,) = (each for each in published() if each.name == name)
    model.save(tmp_path)
    facts = model_facts(tmp_path)
    geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, 64, facts.kv_factor)
    assert geometry.bytes_per_token(torch.bfloat16) == 61 * 576 * 2
    assert (facts.rotation.first_channel, facts.rotation.end_channel) == (512, 576)


YARN = V3["rope_scaling"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("geometry", {"kv_lora_rank": None}, "kv_lora_rank None"),
    ("geometry", {"kv_lora_rank": 0}, "kv_lora_rank 0"),
    ("geometry", {"kv_lora_rank": True}, "kv_lora_rank True"),
    ("geometry", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7"),
    ("geometry", {"qk_rope_head_dim": 0}, "qk_rope_head_dim 0"),
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


@pytest.mark.parametrize(("reason", "changes", "told"), REFUSED, ids=str)
def test_what_only_claims_the_form_is_refused_with_the_value(tmp_path, reason, changes, told):
    with pytest.raises(UnsupportedModelError) as refused:
        facts_of(tmp_path, **changes)
    assert refused.value.reason == reason
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_pools_of_latent_rows(tmp_path):
    sizes, wanted = facts_of(tmp_path).sizes(1), KvGeometry(3, 1, 40, 16, kv_factor=1)
    assert sizes == facts_of(tmp_path).sizes(2)  # every rank holds all of it
    layers = tuple(torch.zeros(4, 1, 16, 40) for _ in range(3))
    for pool in (torch.zeros(4, 3, 1, 16 * 40), LayeredPool(layers)):
        assert geometry_of(pool, sizes) == wanted
    for unfit in (torch.zeros(4, 3, 2, 16 * 40), LayeredPool(layers, layers), LayeredPool(layers[1:])):
        assert geometry_of(unfit, sizes) is None


BLOCK = 8


@pytest.mark.parametrize("mode", EngineMode)
def test_the_worker_saves_and_moves_rows_of_tensorrt_llms_pool(tmp_path, mode):
    """One row a token and layer, in blocks of [layers, 1, tokens * channels]."""
    rotation = facts_of(tmp_path).rotation
    worker = SemBlendKvConnectorWorker(LlmArgs(model=tmp_path))
    pool = torch.randn(32, 3, 1, BLOCK * 40, generator=torch.Generator().manual_seed(0))
    before = pool.clone().view(32, 3, BLOCK, 40)
    worker.register_kv_caches(pool)

    def step(**fields):
        worker.bind_connector_meta(SemBlendConnectorMetadata(**fields))
        worker.start_load_kv(None)
        worker.wait_for_save(None)

    written = RequestProgress(1, (3, 5), 16, True)
    step(followed=(1,), progress=(written,), commands=OffloadCommands(saves=[SaveIntent(1, "donor-1", 100)]))
    done, _ = worker.get_finished([1], [])
    while 1 not in done:
        done, _ = worker.get_finished([], [])
    step(plans=(plan_of(PlanSpan("donor-1", 0, 4, 16), prompt=30, computed=4, blocks=(20, 21, 22, 23), mode=mode),))
    moved = pool.view(32, 3, BLOCK, 40)[[20, 21, 22]].transpose(0, 1).flatten(1, 2)[:, 4:20]
    donor = before[[3, 5]].transpose(0, 1).flatten(1, 2)
    assert torch.equal(moved[..., :32], donor[..., :32])
    torch.testing.assert_close(moved, rotate_keys(donor, 4, rotation.of_layer(0)))
    assert float((moved - donor)[..., 32:].abs().max()) > 0.5
    worker.close()
