"""Latent rows in e4m3, which vLLM's backends for a CPU do not store."""

from dataclasses import replace

import torch

from kernels.layout import indexable
from kernels.rope import saturated
from tests.kernels.builders import FP8


def scale_by(patch, scales):
    """Gives every layer its scale, as a checkpoint would that has them."""
    from vllm.model_executor.layers.attention import MLAAttention

    process = MLAAttention.process_weights_after_loading

    def load(attention, act_dtype):
        process(attention, act_dtype)
        attention._k_scale_float = scales[int(attention.layer_name.split(".")[2])]
        attention._k_scale.fill_(attention._k_scale_float)

    patch.setattr(MLAAttention, "process_weights_after_loading", load)


def store_in_fp8(patch):
    """Has vLLM's CPU backend store latent rows in e4m3 and read them as TRITON_MLA does (0.28, `triton_mla.py`)."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    update, decode, before = (
        CPUMLAImpl.do_kv_cache_update,
        CPUMLAImpl.forward_mqa,
        CPUMLAImpl._compute_prefill_context,
    )

    def stored(impl, latent, turning, cache, slots, kind, scale):
        if cache.dtype == torch.uint8:
            latent, turning = (saturated(each.float() / scale, FP8).view(torch.uint8) for each in (latent, turning))
        update(impl, latent, turning, cache, slots, kind, scale)

    def attend(impl, q, cache, metadata, layer):
        if cache.dtype == FP8:
            cache, table = _read(cache, metadata.decode.block_table, layer._k_scale, impl.kv_b_proj.params_dtype)
            metadata = replace(metadata, decode=replace(metadata.decode, block_table=table))
        return decode(impl, q, cache, metadata, layer)

    def context(impl, q, cache, metadata, scale):
        if cache.dtype != FP8:
            return before(impl, q, cache, metadata, scale)
        cache, table = _read(cache, metadata.prefill.block_table, scale, q.dtype)
        metadata = replace(metadata, prefill=replace(metadata.prefill, block_table=table))
        kind, impl.kv_cache_dtype = impl.kv_cache_dtype, "auto"
        try:
            return before(impl, q, cache, metadata, scale)
        finally:
            impl.kv_cache_dtype = kind

    patch.setattr(CPUMLABackend, "supported_kv_cache_dtypes", ["auto", "fp8", "fp8_e4m3"])
    patch.setattr(CPUMLAImpl, "do_kv_cache_update", stored)
    patch.setattr(CPUMLAImpl, "forward_mqa", attend)
    patch.setattr(CPUMLAImpl, "_compute_prefill_context", context)


def _read(cache, table, scale, dtype):
    """The blocks of a cache in e4m3 that a table names, in `dtype`, and the table of their places there."""
    blocks, places = table.unique(return_inverse=True)
    held = indexable(cache)[blocks.long()].view(FP8).float() * scale
    return held.to(dtype), places.int()
