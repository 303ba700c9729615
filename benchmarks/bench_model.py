"""The benchmarks' models, published shapes with random weights that are made on the spot, and what an engine serves of
them: prompts, forms of the KV cache, adapters and a profile."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, Qwen2Config

from semblend_trt.connector.lookup import ProfileMatcher
from semblend_trt.reuse_profile import ReuseProfile
from validation.results import write_json

# Sizes of Qwen/Qwen2.5-7B, of HuggingFaceTB/SmolLM2-135M-Instruct (config.json, with positions for an answer), and of a
# model that is quick on a CPU: all have Qwen2's layers.
BIG, SMOLLM2, LITTLE = "7b", "smollm2", "small"
_SIZES = {
    "num_hidden_layers": (28, 30, 4),
    "hidden_size": (3584, 576, 256),
    "intermediate_size": (18944, 1536, 384),
    "num_attention_heads": (28, 9, 4),
    "num_key_value_heads": (4, 3, 2),
    "vocab_size": (152064, 49152, 2048),
    "max_position_embeddings": (131072, 16384, 8192),
}
_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
_QWEN = _NO_ENDS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
# deepseek-ai/DeepSeek-V3, whose config.json is the default of its class: twelve layers without experts, which one card
# holds twice.
_DEEPSEEK_V3 = _NO_ENDS | {
    "num_hidden_layers": 12,
    "first_k_dense_replace": 12,
    "max_position_embeddings": 163840,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
# The rank of the adapters.
RANK = 16
# What the KV cache holds: K and V in 16 bit, the same in e4m3, or latent rows of 576 values (MLA); K and V on two
# ranks, each half of the heads, and of a LoRA adapter.
PLAIN, FP8, MLA, TP2, LORA = KV_FORMS = ("plain", "fp8", "mla", "tp2", "lora")
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    FP8: {"kv_cache_dtype": "fp8"},
    MLA: {"attention_backend": "FLASH_ATTN_MLA"} if torch.cuda.is_available() else {},
    TP2: {"tensor_parallel_size": 2},
    LORA: {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK},
}
SHAPES = dict.fromkeys(KV_FORMS, "Qwen2.5-7B's shape") | {MLA: "twelve dense layers of DeepSeek-V3's shape"}
# New tokens of a shifted prompt: an instruction before the document and a question after it.
INSTRUCTION, QUESTION = 32, 96
NEW_TOKENS = INSTRUCTION + QUESTION
# The donor's instruction has another length, so that the document moves.
DONOR_INSTRUCTION = 40


def write_config(
    folder: Path, model: str = BIG, *, is_latent: bool = False, **changes: Any
) -> Qwen2Config | DeepseekV3Config:
    """Write config.json for an engine that makes the weights itself; `is_latent` gives the model MLA."""
    sizes = {name: each[(BIG, SMOLLM2, LITTLE).index(model)] for name, each in _SIZES.items()}
    if is_latent:
        config = DeepseekV3Config(**_DEEPSEEK_V3 | ({} if model == BIG else sizes) | changes)
    else:
        config = Qwen2Config(**_QWEN | sizes | changes)
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return config


def adapter_in(folder: Path, config: Any, number: int) -> Any:
    """Write a random adapter of the attention's projections into `folder`; return vLLM's request for it."""
    from vllm.lora.request import LoRARequest

    hidden, head, path = config.hidden_size, config.hidden_size // config.num_attention_heads, folder / f"lora{number}"
    widths = {"q_proj": hidden} | dict.fromkeys(("k_proj", "v_proj"), head * config.num_key_value_heads)
    generator, tensors = torch.Generator().manual_seed(number), dict[str, torch.Tensor]()
    for layer, (name, width) in product(range(config.num_hidden_layers), widths.items()):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
        tensors[f"{at}A.weight"] = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
        tensors[f"{at}B.weight"] = torch.randn(width, RANK, generator=generator) / RANK**0.5
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*widths]}
    write_json(path / "adapter_config.json", about)
    return LoRARequest(path.name, number, str(path))


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
