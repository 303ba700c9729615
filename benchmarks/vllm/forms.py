"""What the benchmark's engines serve: models by name, forms of the KV cache, and adapters of the model."""

from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from validation.output import write_json

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
BIG, LITTLE, SMOLLM2 = "7b", "small", "smollm2"
# Sizes of HuggingFaceTB/SmolLM2-135M-Instruct, config.json, in Qwen2's layers; with positions for an answer.
MODELS: dict[str, dict[str, Any] | None] = {BIG: None}
MODELS[SMOLLM2] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 16384,
}
MODELS[LITTLE] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}


def adapter_in(folder: Path, config: Any, number: int) -> Any:
    """Write a random adapter of the attention's projections into `folder`; return vLLM's request for it."""
    from vllm.lora.request import LoRARequest

    hidden, head, path = config.hidden_size, config.hidden_size // config.num_attention_heads, folder / f"lora{number}"
    widths = {
        "q_proj": hidden,
        "k_proj": head * config.num_key_value_heads,
        "v_proj": head * config.num_key_value_heads,
    }
    generator, tensors = torch.Generator().manual_seed(number), dict[str, torch.Tensor]()
    for layer, (name, width) in product(range(config.num_hidden_layers), widths.items()):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
        tensors[f"{at}A.weight"] = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
        tensors[f"{at}B.weight"] = torch.randn(width, RANK, generator=generator) / RANK**0.5
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    write_json(
        path / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*widths]}
    )
    return LoRARequest(path.name, number, str(path))
