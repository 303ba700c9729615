"""Installations that the engine cannot run on, and models that take images."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError
from tests.conftest import save_tiny_model, save_with_images
from validation.exactness import plain_difference
from validation.report import MAX_LOGIT_DIFFERENCE

TOKENS = torch.arange(20)[None]


def model_at(path):
    return AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)


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
