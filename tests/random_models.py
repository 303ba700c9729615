"""Small models of every family that the embedded engine runs, with random weights."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from engine_wrapper.embedded.model_runner import SUPPORTED_MODEL_TYPES

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 257  # one token a byte, and the end of text
EOS_TOKEN_ID = 256

FAMILIES = SUPPORTED_MODEL_TYPES
# Mixtures of experts.
MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss")

WINDOW, CHUNK = 32, 64
# Far above the usual 0.02: attention must matter, and the last float bit must not decide argmax.
_SHAPE = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2}
_SHAPE |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
_SHAPE |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 3, "norm_topk_prob": True}
_FEW_EXPERTS = {"num_local_experts": 4, "head_dim": 16}


def _rope(kind, theta, factor, original, **more):
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    return {"rope_parameters": scaling | more}


_YARN = {"beta_fast": 32, "beta_slow": 1}
# What a family's configuration has beside the shape.
_OWN = {
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "head_dim": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    # The layer in the middle is dense.
    "qwen3_moe": _EXPERTS | {"num_experts": 8, "mlp_only_layers": [1], "head_dim": 16},
    # Half of a head's channels rotate, the lowest layer is dense, and one expert sees every token.
    "glm4_moe": _EXPERTS | {"n_routed_experts": 8, "routed_scaling_factor": 2.5, "head_dim": 16},
    # The row of a token is as wide as vLLM's attention on a CPU needs it, and its RoPE is that of the published model.
    "deepseek_v3": _EXPERTS
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_key_value_heads": 4, "q_lora_rank": 48}
    | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    | _rope("yarn", 10000.0, 40.0, 4096, **_YARN, mscale=1.0, mscale_all_dim=1.0),
    # Every other layer has a window, from the lowest on, and a theta of its own.
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    # Every other layer has a window, from the lowest on.
    "gpt_oss": _FEW_EXPERTS
    | {"num_experts_per_tok": 2, "sliding_window": WINDOW}
    | _rope("yarn", 150000.0, 16.0, 128, beta_fast=32.0, beta_slow=1.0, truncate=False),
    # The layer in the middle has neither RoPE nor chunks, and experts beside its dense neighbours. Queries are
    # scaled by their position from the first one on.
    "llama4_text": _FEW_EXPERTS
    | {"num_experts_per_tok": 1, "no_rope_layer_interval": 2, "attention_chunk_size": CHUNK}
    | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 96, "floor_scale": 1, "attn_scale": 0.2}
    | _rope("llama3", 500000.0, 16.0, 128, high_freq_factor=1.0, low_freq_factor=1.0),
    # The layer in the middle has no RoPE.
    "smollm3": {"no_rope_layer_interval": 2},
    # What the shapes of 3.1 multiply by, so that a factor left out changes every logit.
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    | {"attention_multiplier": 0.0625, "logits_scaling": 8.0},
}


def random_model(family, *, seed=0, **changes):
    """A small model of a family with random weights, float32 on the CPU; `changes` go to its configuration."""
    config = CONFIG_MAPPING[family](**(_SHAPE | _OWN.get(family, {}) | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def byte_tokenizer(template=None):
    """One token a byte: no text is out of its vocabulary and no two texts share their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {END_OF_TEXT: EOS_TOKEN_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, chat_template=template)


def save_tiny_model(family, folder, *, seed=0, **changes):
    """Writes a random model of `family`, one of FAMILIES, and its tokenizer; `changes` go to config."""
    own = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}
    random_model(family, seed=seed, **(own | changes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_with_images(text_folder, folder):
    """Writes a Gemma 3 or a Llama 4 that takes images, whose text is read by the model in `text_folder`."""
    text = AutoModelForCausalLM.from_pretrained(text_folder)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    if is_llama4 := text.config.model_type == "llama4_text":
        vision |= {"intermediate_size": 64, "vision_output_dim": 32}
        vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    whole = {"text_config": text.config.to_dict(), "vision_config": vision, "tie_word_embeddings": False}
    config = CONFIG_MAPPING["llama4" if is_llama4 else "gemma3"](**whole)
    model = AutoModelForImageTextToText.from_config(config)
    model.get_decoder().load_state_dict((text if is_llama4 else text.model).state_dict())
    model.get_output_embeddings().load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
