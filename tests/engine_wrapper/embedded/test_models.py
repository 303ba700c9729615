"""Installations that the engine cannot run on, and models that take images."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from engine_wrapper.embedded.model_runner import ModelRunner
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
        runner = ModelRunner(whole, model=model)
    assert runner.facts.model_type == family
    assert sum(each.numel() for each in runner.model.parameters()) < 2 * sum(
        each.numel() for each in model_at(text).parameters()
    )
    tokens = list(range(100, 190))
    assert plain_difference(runner, tokens).difference <= MAX_LOGIT_DIFFERENCE
    expected = model_at(text)(torch.tensor([tokens])).logits
    torch.testing.assert_close(runner.model(torch.tensor([tokens])).logits, expected, rtol=1e-5, atol=1e-4)
