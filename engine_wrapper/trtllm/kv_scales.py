"""The scales by which TensorRT-LLM stores KV in e4m3: of each layer one, for K and V alike.

The connector's contract hands over the pool alone; the scales are the attention backend's, and are read from it.

Facts: NVIDIA/TensorRT-LLM, `TrtllmAttention` of `_torch/attention_backend/trtllm.py` (1.1 to 1.3) and of
`_torch/attention/backends/trtllm.py` (main): `kv_scale_quant_orig`, 1 unless something sets it, and its inverse
`kv_scale_orig_quant`; `cpp/tensorrt_llm/kernels/unfusedAttentionKernels/unfusedAttentionKernels_2_template.h`: K and V
are multiplied by the latter before they are stored.
"""

from __future__ import annotations

import math
from typing import Any

from engine_wrapper.kv_scales import scale_of
from engine_wrapper.self_check import LayoutError


def scales_of(decoder: Any) -> tuple[float, ...]:
    """The scale of each layer of TensorRT-LLM's decoder, None where it is not found; stored KV is multiplied by it when
    it is read.

    Raises LayoutError `kv_scales` where a layer's is not known.
    """
    layers = getattr(decoder, "layers", None)
    if not layers:
        raise LayoutError(
            "kv_scales", f"the engine's decoder, {type(decoder).__name__}, has no layers to read scales of"
        )
    return tuple(_scale(getattr(layer, "self_attn", None), index) for index, layer in enumerate(layers))


def _scale(attention: Any, index: int) -> float:
    backend, owner = getattr(attention, "attn", None), f"layer {index}"
    read, written = (
        scale_of(getattr(backend, name, None), owner, name) for name in ("kv_scale_quant_orig", "kv_scale_orig_quant")
    )
    if not math.isclose(read * written, 1.0, rel_tol=1e-3):
        raise LayoutError(
            "kv_scales", f"{owner} stores KV times {written!r} and reads it times {read!r}, which is not its inverse"
        )
    return read
