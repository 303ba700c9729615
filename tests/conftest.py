"""Tiny random models that several test folders share. Weights are seeded, so every run sees the same ones."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

# Triton decides at its import whether its own functions can be interpreted, and transformers imports it.
if not torch.cuda.is_available() and find_spec("triton"):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401

from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from semblend_trt.connector import model_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A shell that starts the tests in the background has interrupts ignored, in every process that they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; how long they take on a busy machine says nothing about the code.
settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 257  # one token a byte, and the end of text
EOS_TOKEN_ID = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    # Far above the usual 0.02: attention must matter, and argmax must not hang on the last float bit.
    "initializer_range": 0.2,
}

_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 3, "norm_topk_prob": True}

_FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"use_sliding_window": False, "head_dim": 16}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    # The layer in the middle is dense.
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**_EXPERTS, "num_experts": 8, "mlp_only_layers": [1], "head_dim": 16},
    ),
    # Half of a head's channels rotate, the lowest layer is dense, and one expert sees every token.
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {**_EXPERTS, "n_routed_experts": 8, "routed_scaling_factor": 2.5, "head_dim": 16},
    ),
}
FAMILIES = tuple(_FAMILIES)
# Mixtures of experts, whose layers are never fused.
MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: no text is out of its vocabulary and no two texts share their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {END_OF_TEXT: EOS_TOKEN_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def save_tiny_model(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a random model of `family`, one of FAMILIES, and its tokenizer; `changes` go to config."""
    config_class, model_class, family_fields = _FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(_SHAPE | family_fields | changes)))
    model.to(torch.float32).eval().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the product keeps for its user, such as the key of donors' files, is kept in a folder of the tests."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _digests_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own cache keeps nothing of tests."""
    folder = tmp_path_factory.mktemp("digests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "user_folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def tiny_model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder of each supported family."""
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(f"tiny-{family}")) for family in _FAMILIES}


@pytest.fixture(scope="session")
def tiny_qwen2_path(tiny_model_paths: dict[str, Path]) -> Path:
    return tiny_model_paths["qwen2"]


@pytest.fixture(scope="session")
def tiny_qwen3_path(tiny_model_paths: dict[str, Path]) -> Path:
    return tiny_model_paths["qwen3"]


@pytest.fixture(scope="session")
def tiny_llama_path(tiny_model_paths: dict[str, Path]) -> Path:
    return tiny_model_paths["llama"]
