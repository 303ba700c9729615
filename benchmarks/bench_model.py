"""The benchmarks' model: a published shape with random weights that are made on the spot; prompts for it, and the
profile that its engine is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import DeepseekV3Config, Qwen2Config

from semblend_trt.connector.lookup import ProfileMatcher
from semblend_trt.reuse_profile import ReuseProfile

_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
# Qwen/Qwen2.5-7B, config.json; positions enough for the longest prompt and its answer.
_QWEN_7B: dict[str, Any] = _NO_ENDS | {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
# deepseek-ai/DeepSeek-V3, whose config.json is the default of its class: twelve layers without experts, which one card
# holds twice.
_DEEPSEEK_V3: dict[str, Any] = _NO_ENDS | {
    "num_hidden_layers": 12,
    "first_k_dense_replace": 12,
    "max_position_embeddings": 163840,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
# Quick on a CPU.
NARROW: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 512}
# New tokens of a shifted prompt: an instruction before the document and a question after it.
INSTRUCTION, QUESTION = 32, 96
NEW_TOKENS = INSTRUCTION + QUESTION
# The donor's instruction has another length, so that the document moves.
DONOR_INSTRUCTION = 40


def write_config(
    folder: Path, small: Mapping[str, Any] | None = None, *, is_latent: bool = False
) -> Qwen2Config | DeepseekV3Config:
    """Write config.json for an engine that makes the weights itself; `small` changes it, `is_latent` gives it MLA."""
    kind, own = (DeepseekV3Config, _DEEPSEEK_V3) if is_latent else (Qwen2Config, _QWEN_7B)
    config = kind(**own | dict(small or {}))
    config.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return config


class Prompts:
    """Draws random token ids below `vocabulary`, so that no two prompts share a prefix."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> list[int]:
        drawn: list[int] = self._random.integers(0, self._vocabulary, tokens).tolist()
        return drawn

    def document(self, size: int) -> list[int]:
        """Return the part that a donor and the shifted prompts of `size` tokens share."""
        return self.fresh(size - NEW_TOKENS)

    def donor(self, document: list[int]) -> list[int]:
        return self.fresh(DONOR_INSTRUCTION) + document + self.fresh(NEW_TOKENS - DONOR_INSTRUCTION)

    def shifted(self, document: list[int]) -> list[int]:
        return self.fresh(INSTRUCTION) + document + self.fresh(QUESTION)

    def in_runs(self, document: list[int], size: int, run: int) -> list[int]:
        """Return a prompt of `size` tokens: the runs of a document that it has room for beside INSTRUCTION new
        tokens, in random order."""
        order = self._random.permutation((size - INSTRUCTION) // run).tolist()
        runs = [token for index in order for token in document[index * run : (index + 1) * run]]
        return self.fresh(INSTRUCTION // 2) + runs + self.fresh(size - INSTRUCTION // 2 - len(runs))


def use_profile(scheduler: Any, folder: Path, **terms: Any) -> None:
    """Have the scheduler half of an engine use a profile of these terms, which `folder` keeps, from now on. `terms` are
    those of `ReuseProfile.made_for`."""
    path = folder / "reuse-profile.json"
    ReuseProfile.made_for(scheduler.namespace, scheduler._runtime.pool.geometry, **terms).write(path)
    settings = scheduler._settings.model_copy(update={"profile_path": path, "profile_trial": True})
    scheduler._lookup._profiles = ProfileMatcher(settings)


def label(size: int) -> str:
    """Return 24576 as 24k."""
    return f"{size // 1024}k" if size % 1024 == 0 else str(size)
