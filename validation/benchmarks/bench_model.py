"""The benchmarks' model, the shape of Qwen2.5-7B with random weights made on the spot, and prompts for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from engine_wrapper.embedded.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from semblend_trt.ranks import Ranks

# Qwen/Qwen2.5-7B, config.json; positions enough for the longest prompt and its answer.
_QWEN_7B: dict[str, Any] = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
# A dry run shows that everything runs; its figures say nothing about the model above.
_NARROW: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 512}
# Weights so wide that the largest logit does not hang on the last bit of a sum: other orders of adding find it as well.
_DECIDED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "initializer_range": 0.2,
}
# The size that most goals are set for, and that of prompts without a donor.
GOAL_SIZE, MISS_SIZE = 24_576, 8_192
# New tokens of a shifted prompt: an instruction before the document and a question behind it.
INSTRUCTION, QUESTION = 32, 96
# The donor's instruction has another length, so that the document moves.
DONOR_INSTRUCTION = 40
NEW_TOKENS = INSTRUCTION + QUESTION


def make_runner(
    folder: Path, device: str, layers: int | None = None, seed: int = 0, ranks: Ranks | None = None
) -> ModelRunner:
    """Makes the model on `device`, bf16 on a card and float32 elsewhere, and writes its config.json to `folder`.

    With `layers` it is narrow and has so many of them, for a dry run. Each of `ranks` keeps its part.
    """
    narrow = {} if layers is None else _NARROW | {"num_hidden_layers": layers}
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return _make(narrow, folder, device, dtype, seed, ranks)


def write_config(folder: Path, small: Mapping[str, Any] | None = None) -> Qwen2Config:
    """Writes the model's config.json to `folder`, for an engine that makes the weights itself; `small` changes it."""
    config = Qwen2Config(**_QWEN_7B | dict(small or {}))
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return config


def make_decided_runner(folder: Path, device: str, ranks: Ranks | None = None) -> ModelRunner:
    """Makes a small model in float32 whose answers are the same whatever the order in which sums are added."""
    return _make(_DECIDED, folder, device, torch.float32, 0, ranks)


def _make(
    shape: dict[str, Any], folder: Path, device: str, dtype: torch.dtype, seed: int, ranks: Ranks | None
) -> ModelRunner:
    config = write_config(folder, shape)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return ModelRunner.from_model(model, folder, ranks=ranks)


class Prompts:
    """Draws token ids below `vocabulary`; no two draws share a beginning that a prefix cache could use."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> list[int]:
        drawn: list[int] = self._random.integers(0, self._vocabulary, tokens).tolist()
        return drawn

    def document(self, size: int) -> list[int]:
        """The part that a donor and the shifted prompts of `size` tokens share."""
        return self.fresh(size - NEW_TOKENS)

    def donor(self, document: list[int]) -> list[int]:
        return self.fresh(DONOR_INSTRUCTION) + document + self.fresh(NEW_TOKENS - DONOR_INSTRUCTION)

    def shifted(self, document: list[int]) -> list[int]:
        return self.fresh(INSTRUCTION) + document + self.fresh(QUESTION)


def label(size: int) -> str:
    """24576 as 24k."""
    return f"{size // 1024}k" if size % 1024 == 0 else str(size)
