"""Installations that the engine cannot run on, and models in parts: run together, they are the model."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.models import keep_shard
from semblend_trt.errors import ConfigurationError
from semblend_trt.ranks import Ranks
from tests.conftest import MIXTURES, save_tiny_model, save_with_images
from tests.semblend_trt.rank_threads import on_ranks
from validation.exactness import plain_difference
from validation.report import MAX_LOGIT_DIFFERENCE

TOKENS = torch.arange(20)[None]


def model_at(path):
    return AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"head_dim": 24}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("granite", {}),
        ("gemma3_text", {"attention_bias": True}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_two_parts_give_the_logits_of_the_whole(family, changes, tmp_path):
    path = save_tiny_model(family, tmp_path, **changes)
    models = [model_at(path) for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    for name, fresh in models[0].named_parameters():
        if name.endswith("bias"):  # a new model's are 0
            fresh.normal_(generator=generator)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    whole = models[2](TOKENS).logits

    def run(ranks):
        model = models[ranks.rank]
        keep_shard(model, ranks)
        assert model.model.layers[0].self_attn.k_proj.weight.shape[0] == whole_keys // 2
        with torch.inference_mode():
            return model(TOKENS).logits

    whole_keys = models[2].model.layers[0].self_attn.k_proj.weight.shape[0]
    parts = on_ranks(2, run)
    assert torch.equal(parts[0], parts[1])
    torch.testing.assert_close(parts[0], whole, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen2", 4, "num_key_value_heads is 2, which 4 ranks do not divide"),
        *(
            (family, 2, rf"type {family} are not known to be divided among ranks; use 1")
            for family in (*MIXTURES, "llama4_text")
        ),
        ("olmo2", 2, r"olmo2 norms the keys of all heads at once, 32 channels.*use 1 rank"),
        ("deepseek_v3", 2, r"deepseek_v3 keeps one latent row a token for all heads.*use 1 rank"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_and_kept(tmp_path, family, size, message):
    model, ranks = model_at(save_tiny_model(family, tmp_path)), Ranks()
    ranks.size = size
    before = {name: each.shape for name, each in model.named_parameters()}
    with pytest.raises(ConfigurationError, match=message):
        keep_shard(model, ranks)
    assert {name: each.shape for name, each in model.named_parameters()} == before


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_of_a_model_that_takes_images_the_part_that_reads_text_runs(tmp_path, family, is_loaded):
    text = save_tiny_model(f"{family}_text", tmp_path / "text")
    whole = save_with_images(text, tmp_path / "whole")
    if is_loaded:
        runner = ModelRunner(whole, "float32", "cpu")
    else:
        model = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32)
        runner = ModelRunner.from_model(model, whole)
    assert runner.facts.model_type == family
    assert sum(each.numel() for each in runner.model.parameters()) < 2 * sum(
        each.numel() for each in model_at(text).parameters()
    )
    tokens = list(range(100, 190))
    assert plain_difference(runner, tokens).difference <= MAX_LOGIT_DIFFERENCE
    expected = model_at(text)(torch.tensor([tokens])).logits
    torch.testing.assert_close(runner.model(torch.tensor([tokens])).logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("version", ["4.53.1", "4.57.1", "4.99.0.dev0"])
def test_transformers_4_is_refused_in_one_sentence(tiny_qwen2_path, monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(
        ConfigurationError, match=rf"Transformers {version} is installed.*need 5\.0 or later"
    ) as refused:
        LLM(model=tiny_qwen2_path)
    assert "\n" not in str(refused.value)
