"""The model runner: loading or refusing a model, and running slices with the plans that are pending for them."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from tests.semblend_trt.engine_specs import change_config


@pytest.fixture
def model_folder(tiny_qwen2_path, tmp_path):
    return Path(shutil.copytree(tiny_qwen2_path, tmp_path / "model"))


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("gpt2", "GPT2LMHeadModel", "unknown_model_type"),
        ("phi3", "Phi3ForCausalLM", "engine_model_type"),
        ("qwen2", "Qwen2ForTokenClassification", "unknown_architecture"),
    ],
)
def test_an_unsupported_architecture_is_refused(model_folder, model_type, architecture, reason):
    change_config(model_folder, model_type=model_type, architectures=[architecture])
    with pytest.raises(UnsupportedModelError) as refusal:
        ModelRunner(model_folder, device="cpu")
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"not weights"), "its weights cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "its weights cannot be read"),
        (
            lambda folder: change_config(folder, num_hidden_layers=4, layer_types=None),
            "12 weights are missing, the first is model.layers.3",
        ),
        (
            lambda folder: change_config(folder, vocab_size=300),
            "2 weights are of another shape, the first is lm_head.weight",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer .* (has no vocabulary|cannot be read)"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused_in_one_sentence(model_folder, change, message):
    change(model_folder)
    with pytest.raises(ConfigurationError, match=message) as refusal:
        ModelRunner(model_folder, device="cpu")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype int8 is not supported; use auto, float32"),
        ({"dtype": torch.float64}, "dtype torch.float64 is not supported"),
        ({"device": "abacus"}, "device abacus is unknown"),
        ({"device": "mps"}, "device mps is not supported"),
        ({"device": "cuda:99"}, "device cuda:99 was asked for"),
    ],
)
def test_unknown_settings_are_refused(tiny_qwen2_path, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ModelRunner(tiny_qwen2_path, **settings)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2, "layer_types": None}, {"rms_norm_eps": 0.05}])
def test_a_model_that_computes_otherwise_than_the_one_described_is_refused(model_folder, changes):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    change_config(model_folder, **changes)
    with pytest.raises(ConfigurationError, match="describes a model that computes otherwise"):
        ModelRunner(model_folder, model=model)
