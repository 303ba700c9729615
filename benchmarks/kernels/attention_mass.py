"""Measures attention_mass: 64 rows over 24k tokens in one layer of Qwen2.5-7B, beside torch and the rows' forward.

The shape is 28 query heads, 4 KV heads, head dimension 128, bf16, random values, in a pool whose blocks are shuffled.
The price is that of the mass and of the log-sum-exp that the rows' attention stores for it. The rows' own forward is a
layer's matrix products (hidden 3,584, inner 18,944) and its attention. Every result is checked before it is timed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.kernels.ceilings import QWEN_7B, add_share, check_close, copy_gbps, run_on_card, time_ms
from benchmarks.kernels.sparse_prefill import HEADS, LAYER, SCALE, Case, make_case
from kernels.attention_mass import triton_mass
from kernels.layout import PoolLayer
from kernels.sparse_prefill import by_torch as in_torch
from kernels.sparse_prefill.triton_attention import sparse_prefill
from validation.results import Results

ROWS, TOKENS = 64, 24576
HIDDEN, INNER = 3584, 18944
# Attention is summed over the upper half of the layers.
LAYERS_SHARE, FORWARD_GOAL = 0.5, 0.10
MAX_ERROR = 1e-2


def layer_ms(case: Case) -> float:
    """Return milliseconds of one decoder layer over the case's rows, without norms."""
    qkv = HIDDEN + 2 * QWEN_7B.kv_heads * QWEN_7B.head_dim
    sizes = [(HIDDEN, qkv), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)]
    weights = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
    inputs = [torch.randn(ROWS, size[0], dtype=torch.bfloat16, device="cuda") for size in sizes]

    def forward() -> None:
        for values, weight in zip(inputs, weights, strict=True):
            torch.mm(values, weight)
        nn.functional.silu(inputs[-1])
        case.run()

    return time_ms(forward)


def measure(results: Results) -> None:
    """Add all rows."""
    case = make_case(torch.arange(TOKENS - ROWS, TOKENS))
    kv, own = PoolLayer(case.pool, LAYER, QWEN_7B), (case.sequence,)
    lse, plain = torch.empty(2, ROWS, HEADS, device="cuda")
    into = torch.zeros(QWEN_7B.kv_heads, TOKENS, device="cuda")
    attend = partial(sparse_prefill, case.q, kv, own, SCALE, lse=lse)
    mass = partial(triton_mass.attention_mass, case.q, kv, own, SCALE, lse, None)
    by_torch = partial(in_torch.attention_mass, case.q, kv, own, SCALE, plain, None)
    case.check(attend())
    in_torch.sparse_prefill(case.q, kv, own, SCALE, lse=plain)
    error = check_close("lse", lse, plain, MAX_ERROR)
    error = max(error, check_close("attention_mass", mass(into.clone()), by_torch(into.clone()), MAX_ERROR))
    of_mass, of_torch = (time_ms(partial(run, into)) for run in (mass, by_torch))
    without, of_rows = time_ms(case.run), time_ms(attend)
    flops = 2.0 * case.attended * HEADS * QWEN_7B.head_dim
    against = f"{flops / of_mass / 1e9:.0f} TFLOP/s; copy {copy_gbps():.0f} GB/s; error {error:.1e}"
    results.add("attention_mass_64_rows_24k_ms", of_mass, "ms", against)
    results.add("attention_mass_lse_ms", of_rows - without, "ms", f"sparse_prefill without lse: {without:.3f} ms")
    num_bytes = TOKENS * QWEN_7B.bytes_per_token(torch.bfloat16) / QWEN_7B.num_layers / 2
    add_share(results, "attention_mass", of_mass, num_bytes)
    results.add("attention_mass_over_torch", of_mass / of_torch, "ratio", f"torch: {of_torch:.3f} ms")
    whole, price = layer_ms(case), of_mass + of_rows - without
    against = f"mass and lse in {LAYERS_SHARE:.0%} of the layers; one layer of the rows takes {whole:.3f} ms"
    results.add("attention_mass_share_of_forward", price * LAYERS_SHARE / whole, "ratio", against, FORWARD_GOAL)


if __name__ == "__main__":
    run_on_card("attention_mass", measure, __doc__)
