"""What vLLM's CPU builds lack of latent attention (vLLM 0.28, `model_executor/layers/attention/mla_attention.py`)."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from kernels.layout import indexable
from kernels.rope import saturated
from tests.kernels.builders import FP8

_HERE = "vllm.v1.attention.backends.mla.prefill"


def complete(patch):
    """Puts in what is missing."""
    if find_spec(f"{_HERE}.cpu_sdpa") is not None:
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.attention import mla_attention

    patch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: _prefill_backend())
    patch.setattr(mla_attention, "merge_attn_states", _join)
    patch.setattr(_custom_ops, "gather_and_maybe_dequant_cache", _gather)
    # The weights of one projection are read once more after vLLM has packed them.
    keep = partial(_keep_weights, utils.dispatch_cpu_unquantized_gemm)
    patch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)


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


def _keep_weights(stock, layer, remove_weight):
    stock(layer, remove_weight=False)


def _prefill_backend():
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    class TorchPrefill(MLAPrefillBackend):
        """In the place of the one that a card has."""

        @staticmethod
        def get_name():
            return "FLASH_ATTN"

        def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, **_):
            starts = self._prefill_metadata.query_start_loc
            output, sums = _attend(q, k, v, starts, starts, self.scale, causal=True)
            return (output, sums) if return_softmax_lse else output

        def run_prefill_context_chunk(self, chunk, q, k, v, **_):
            return _attend(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, self.scale, causal=False)

    return TorchPrefill


def _attend(q, k, v, queries, keys, scale, causal):
    """Attention of sequences that begin at `queries` and `keys`; the output, and each softmax's logarithmic sum."""
    outputs, sums = [], []
    pairs = (zip(each[:-1].tolist(), each[1:].tolist(), strict=True) for each in (queries, keys))
    for (begin, end), (first, last) in zip(*pairs, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[first:last]) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        sums.append(scores.logsumexp(-1))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first:last]))
    return torch.cat(outputs), torch.cat(sums, 1)


def _gather(*, src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, seq_starts, **_):
    sequences = token_to_seq[:num_tokens].long()
    positions = torch.arange(num_tokens) - cu_seq_lens[sequences] + seq_starts[sequences]
    size = src_cache.shape[1]
    dst[:num_tokens] = src_cache[block_table[sequences, positions // size].long(), positions % size]


def _join(*, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None, **_):
    both = torch.stack([prefix_lse, suffix_lse])
    share = both.softmax(0)[0].T[..., None]
    joined = prefix_output * share + suffix_output * (1 - share)
    if output_lse is not None:
        output_lse.copy_(both.logsumexp(0))
    output.copy_(joined)
