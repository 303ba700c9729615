"""What one forward of TensorRT-LLM's engine runs, read from what it hands to the model.

Facts: NVIDIA/TensorRT-LLM, `_torch/attention_backend/interface.py`, `AttentionMetadata` (1.1 to 1.3), and
`_torch/attention/backends/interface.py` (main): sequences stand in one row of tokens, those in context first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.batch import Batch
from engine_wrapper.self_check import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping


def batch_of_call(options: Mapping[str, Any]) -> Batch:
    """The batch of a call of the decoder's forward. Raises LayoutError when it cannot be read, or asks for more."""
    for name in ("inputs_embeds", "lora_params", "spec_metadata", "mrope_config"):
        value = options.get(name)
        if value is not None and value != {}:
            raise LayoutError("model_call", f"the model was called with {name}, which plans cannot follow")
    metadata, input_ids = options.get("attn_metadata"), options.get("input_ids")
    try:
        lengths = tuple(map(int, metadata.seq_lens.tolist()))  # type: ignore[union-attr]
        begins = tuple(map(int, metadata.kv_cache_params.num_cached_tokens_per_seq))  # type: ignore[union-attr]
        ids = tuple(map(int, metadata.request_ids))  # type: ignore[union-attr]
        contexts = int(metadata.num_contexts)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError) as error:
        raise LayoutError("model_call", f"the attention metadata cannot be read: {error}") from error
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 1 or len(input_ids) != sum(lengths):
        raise LayoutError("model_call", f"input_ids are not the {sum(lengths)} tokens that the metadata speaks of")
    if not len(ids) == len(begins) == len(lengths) or contexts > len(ids):
        raise LayoutError("model_call", "the metadata speaks of another number of sequences in each field")
    return Batch(ids, begins, lengths, contexts, input_ids)
