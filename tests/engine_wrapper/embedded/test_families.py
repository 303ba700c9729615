"""Every family's logits within an engine are a cold engine's, after a moved run too, and a wrong rotation shows.

Of models that take images the part that reads text runs."""

from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from engine_wrapper.embedded.model_runner import ModelRunner
from tests.random_models import FAMILIES, WINDOW, random_model, save_tiny_model, save_with_images
from validation.arms import POSITION_FIX
from validation.embedded_engine import EmbeddedEngines
from validation.exactness import plain_difference, stock_difference
from validation.report import MAX_LOGIT_DIFFERENCE

TOKENS, MIN_SPAN = 333, 32
WRONG = 100 * MAX_LOGIT_DIFFERENCE
# Above a layer with a window K and V depend on the tokens within it: the first tokens of a moved run are computed.
WITH_WINDOWS = ("gpt_oss", "gemma3_text")


def difference(folder, family, arms, **changes):
    """The largest difference of any logit from a cold engine's, with all layers computed again and under `arms`."""
    model = random_model(family, **changes)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tokens = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    engines = EmbeddedEngines(ModelRunner(folder, model=model))
    return stock_difference(engines, str(folder), "the engine", tokens, MIN_SPAN, arms).difference


def moved_difference(folder, family, computed=WINDOW - 1):
    """The same after a moved run, whose first `computed` tokens are computed where the model has windows."""
    if family in WITH_WINDOWS:
        return difference(folder, family, (f"epic_{computed}",), num_hidden_layers=2)
    one_chunk = {"attention_chunk_size": 1024} if family == "llama4_text" else {}
    return difference(folder, family, (POSITION_FIX,), num_hidden_layers=1, **one_chunk)


@pytest.mark.promise("engines", "Without reuse the wrapper's forward equals...")
@pytest.mark.promise(
    "engines",
    "Above a layer with a window of n, a moved run whose first n - 1 tokens are computed is that of a cold run, in "
    "the embedded engine and in vLLM, through vLLM's attention and through ours",
)
@patch("validation.exactness._ANSWER_TOKENS", 4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(tmp_path, family):
    assert difference(tmp_path, family, ()) <= MAX_LOGIT_DIFFERENCE
    assert moved_difference(tmp_path, family) <= MAX_LOGIT_DIFFERENCE


@pytest.mark.promise("engines", "Above a layer with a window...")
def test_a_window_reaches_as_far_into_a_moved_run(tmp_path):
    """With one computed token fewer, a token of the run is kept that depends on another one before the run."""
    assert moved_difference(tmp_path, "gpt_oss", WINDOW - 2) > WRONG


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
    alone = AutoModelForCausalLM.from_pretrained(text).requires_grad_(False)
    own, read = (sum(each.numel() for each in model.parameters()) for model in (runner.model, alone))
    assert own < 2 * read
    tokens = list(range(100, 190))
    assert plain_difference(runner, tokens).difference <= MAX_LOGIT_DIFFERENCE
    expected = alone(torch.tensor([tokens])).logits
    torch.testing.assert_close(runner.model(torch.tensor([tokens])).logits, expected, rtol=1e-5, atol=1e-4)
