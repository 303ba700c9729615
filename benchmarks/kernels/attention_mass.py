"""Measures attention_mass: 64 rows over 24k tokens in one layer of Qwen2.5-7B, beside torch and the rows' forward.

The shape is 28 query heads, 4 KV heads, head dimension 128, bf16, random values, in a pool whose blocks are shuffled.
The rows' own forward is a layer's matrix products (hidden 3,584, inner 18,944) and its attention. Every result is
checked before it is timed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.kernels.ceilings import QWEN_7B, add_share, check_close, copy_gbps, run_on_card, time_ms
from benchmarks.kernels.sparse_prefill import HEADS, LAYER, SCALE, Case, make_case
from kernels.attention_mass import attention_mass_by_torch, row_lse_by_torch, triton_mass
from kernels.layout import PoolLayer

if TYPE_CHECKING:
    from validation.results import Results

ROWS, TOKENS = 64, 24576
HIDDEN, INNER = 3584, 18944
# Attention is summed over the upper half of the layers.
LAYERS_SHARE, FORWARD_GOAL = 0.5, 0.10
MAX_ERROR = 1e-2


def layer_ms(case: Case) -> float:
    """Return milliseconds of one decoder layer over the case's rows, without norms."""
    sizes = [
        (HIDDEN, HIDDEN + 2 * QWEN_7B.kv_heads * QWEN_7B.head_dim),
        (HIDDEN, HIDDEN),
        (HIDDEN, 2 * INNER),
        (INNER, HIDDEN),
    ]
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
    lse = triton_mass.row_lse(case.q, kv, own, SCALE, None, None)
    into = torch.zeros(QWEN_7B.kv_heads, TOKENS, device="cuda")
    plain = row_lse_by_torch(case.q, kv, own, SCALE)
    error = check_close("row_lse", lse, plain, MAX_ERROR)
    expected = attention_mass_by_torch(case.q, kv, own, SCALE, None, plain, into.clone())
    mass = partial(triton_mass.attention_mass, case.q, kv, own, SCALE, None, lse)
    error = max(error, check_close("attention_mass", mass(into.clone()), expected, MAX_ERROR))
    of_lse = time_ms(lambda: triton_mass.row_lse(case.q, kv, own, SCALE, None, None))
    of_mass = time_ms(lambda: mass(into))
    by_torch = time_ms(
        lambda: attention_mass_by_torch(case.q, kv, own, SCALE, None, row_lse_by_torch(case.q, kv, own, SCALE), into)
    )
    flops = 2.0 * case.attended * HEADS * QWEN_7B.head_dim
    for name, took in (("row_lse", of_lse), ("attention_mass", of_mass)):
        told = f"{flops / took / 1e9:.0f} TFLOP/s; copy {copy_gbps():.0f} GB/s; error {error:.1e}"
        results.add(f"{name}_64_rows_24k_ms", took, "ms", told)
    both, num_bytes = of_lse + of_mass, TOKENS * QWEN_7B.bytes_per_token(torch.bfloat16) / QWEN_7B.num_layers / 2
    add_share(results, "attention_mass", of_mass, num_bytes)
    results.add("attention_mass_over_torch", both / by_torch, "ratio", f"torch: {by_torch:.3f} ms, with row_lse")
    whole = layer_ms(case)
    told = f"both kernels in {LAYERS_SHARE:.0%} of the layers; one layer of the rows takes {whole:.3f} ms"
    results.add("attention_mass_share_of_forward", both * LAYERS_SHARE / whole, "ratio", told, FORWARD_GOAL)


if __name__ == "__main__":
    run_on_card("attention_mass", measure, __doc__)
