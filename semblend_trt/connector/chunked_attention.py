"""Chunked attention of Llama 4's form: which configurations are of that form.

Positions are cut into chunks of `attention_chunk_size` tokens, from 0 on. A token of a layer with chunks sees those of
its own chunk up to itself; these layers have RoPE, and the others, with full attention, have none. Facts: Transformers,
`models/llama4/` (pairs of neighbouring channels turn, and K is normed without weights behind the rotation, so that it
moves as any other), and vLLM, `model_executor/models/llama4.py` (which puts the channels of Q and K into another order
as it loads them, so that halves turn, and knows no bias).
"""

from __future__ import annotations

from typing import Any

from semblend_trt.errors import UnsupportedModelError

# Of text alone, and of a model that takes images too.
MODEL_TYPE = "llama4_text"
LLAMA4 = (MODEL_TYPE, "llama4")
_KINDS = ("full_attention", "chunked_attention")


def check_chunked(model_type: str, config: Any) -> None:
    """Raises UnsupportedModelError for layers with chunks of another form than Llama 4's. `config`: as Transformers
    understands it, its `no_rope_layers` being one for each layer."""
    types = list(getattr(config, "layer_types", None) or ())
    if model_type != MODEL_TYPE:
        if "chunked_attention" in types:
            raise UnsupportedModelError("attention_layout", f"model type {model_type!r} is not known to have chunks")
        return
    chunk = config.attention_chunk_size
    if type(chunk) is not int or chunk < 1:
        raise UnsupportedModelError(
            "attention_layout", f"attention_chunk_size is {chunk!r}; a whole number of tokens above 0 is needed"
        )
    turning = list(config.no_rope_layers)
    if types != [_KINDS[each] for each in turning]:
        raise UnsupportedModelError(
            "attention_layout",
            f"layer types {types} do not fit no_rope_layers {turning}; engines put chunks into the layers with RoPE",
        )
    if 0 not in turning and chunk < config.max_position_embeddings:
        raise UnsupportedModelError("attention_layout", f"all layers have chunks of {chunk}; no check could see far")
    if config.attention_bias:
        raise UnsupportedModelError(
            "attention_layout", f"attention_bias is {config.attention_bias}; vLLM computes {model_type} without"
        )
