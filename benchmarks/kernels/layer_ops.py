"""The layer operations at the size of Qwen2.5-7B, as a share of the speed at which the card copies.

`python -m benchmarks.kernels.layer_ops --json benchmarks/results/<machine>`; each beside what Transformers runs for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.activations import ACT2FN
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from benchmarks.kernels.ceilings import (
    QWEN_7B,
    ROTATION,
    add_share,
    check_close,
    copy_gbps,
    random_pool,
    run_on_card,
    time_ms,
)
from kernels.dispatch import has_kernels
from kernels.kv_move.move import tensor_of
from kernels.layer_ops import add_rms_norm, eager, rotate_rows, silu_mul, slots_of
from kernels.layout import PoolLayer, pool_view
from kernels.sparse_prefill import SequenceRows
from validation.results import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from validation.results import Results

HIDDEN, INNER, HEADS, EPS = 3584, 18944, 28, 1e-6
LAYER = 2
ROWS = {"24k": 24576, "128": 128}
TOLERANCE = 1e-2

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on its inputs: the kernel, the same in Transformers, and the bytes that must be read and written.

    `check` returns what the kernel and torch make of copies of the inputs.
    """

    name: str
    run: Callable[[], object]
    transformers: Callable[[], object]
    num_bytes: int
    check: Callable[[], Pairs]


def measure(results: Results) -> None:
    """Checks every operation against torch at each size, then measures it."""
    if not has_kernels(torch.device("cuda")):
        raise SystemExit("This benchmark needs Triton, which the extra `gpu` installs.")
    for size, rows in ROWS.items():
        for make in (norm_case, swiglu_case, rotation_case):
            case = make(rows)
            error = max(check_close(case.name, *pair, TOLERANCE) for pair in case.check())
            say(f"{case.name} on {size} rows: relative error against torch {error:.1e}")
            ours, theirs = time_ms(case.run), time_ms(case.transformers)
            baseline = f"Transformers {theirs:.4f} ms; copy {copy_gbps():.0f} GB/s, read + written"
            name = f"layer_ops_{case.name}_{size}"
            results.add(f"{name}_ms", ours, "ms", baseline)
            results.add(f"{name}_gbps", case.num_bytes / ours / 1e6, "GB/s", baseline, better="higher")
            add_share(results, name, ours, case.num_bytes)


def norm_case(rows: int) -> Case:
    """The residual added and the norm: two arrays read, two written."""
    values, residual, weight = _random(rows, HIDDEN), _random(rows, HIDDEN), _random(HIDDEN)
    module = Qwen2RMSNorm(HIDDEN, EPS).to(values.device, values.dtype)
    module.weight.copy_(weight)

    def check() -> Pairs:
        sums = residual.clone(), residual.clone()
        actual = add_rms_norm(values, sums[0], weight, EPS)
        return [(actual, eager.add_rms_norm(values, sums[1], weight, EPS)), sums]

    return Case(
        "add_rms_norm",
        lambda: add_rms_norm(values, residual, weight, EPS),
        lambda: module(residual + values),
        4 * values.nbytes + weight.nbytes,
        check,
    )


def swiglu_case(rows: int) -> Case:
    """SwiGLU; Transformers has gate and up from two products, so as two arrays."""
    gate_up = _random(rows, 2 * INNER)
    gate, up = (part.contiguous() for part in gate_up.chunk(2, dim=1))
    activation = ACT2FN["silu"]
    return Case(
        "silu_mul",
        lambda: silu_mul(gate_up),
        lambda: activation(gate) * up,
        gate_up.nbytes + gate.nbytes,
        lambda: [(silu_mul(gate_up), eager.silu_mul(gate_up))],
    )


def rotation_case(rows: int) -> Case:
    """The rotation and the write of K and V into shuffled blocks; for Transformers the write is torch's indexing."""
    head_dim, kv_heads = QWEN_7B.head_dim, QWEN_7B.kv_heads
    qkv, paged = _random(rows, (HEADS + 2 * kv_heads) * head_dim), random_pool(rows)
    pool, positions = tensor_of(paged), torch.arange(rows)
    slots = slots_of([SequenceRows(0, positions, paged.block_ids).to(str(pool.device))], QWEN_7B.block_size)
    angles = positions[:, None] * torch.tensor(ROTATION.inverse_frequencies, dtype=torch.float64)
    cos, sin = (table.to(qkv.device, torch.float32) for table in (angles.cos(), angles.sin()))
    tables = [torch.cat([table, table], 1)[None].to(qkv.dtype) for table in (cos, sin)]
    query, key, value = qkv.view(rows, -1, head_dim).split([HEADS, kv_heads, kv_heads], 1)
    heads_first = [part.contiguous().transpose(0, 1)[None] for part in (query, key)]
    blocks, offsets = slots // QWEN_7B.block_size, slots % QWEN_7B.block_size
    # layer_pool: [blocks, 2, kv_heads, block_size, head_dim]
    layer_pool = pool_view(pool, QWEN_7B)[:, LAYER]

    def transformers() -> None:
        _, turned = apply_rotary_pos_emb(*heads_first, *tables)
        layer_pool[blocks, 0, :, offsets] = turned[0].transpose(0, 1)
        layer_pool[blocks, 1, :, offsets] = value

    def check() -> Pairs:
        turned, pools = (qkv.clone(), qkv.clone()), (pool.clone(), pool.clone())
        rotate_rows(turned[0], cos, sin, slots, PoolLayer(pools[0], LAYER, QWEN_7B))
        eager.rotate_rows(turned[1], cos, sin, slots, PoolLayer(pools[1], LAYER, QWEN_7B), None)
        actual, expected = (pool_view(each, QWEN_7B)[:, LAYER][blocks, :, :, offsets] for each in pools)
        return [turned, (actual, expected)]

    read, turned_heads, moved_heads = qkv.nbytes, HEADS + kv_heads, 2 * kv_heads
    written = rows * (turned_heads + moved_heads) * head_dim * qkv.element_size()
    return Case(
        "rotate_rows",
        lambda: rotate_rows(qkv, cos, sin, slots, PoolLayer(pool, LAYER, QWEN_7B)),
        transformers,
        read + written + cos.nbytes + sin.nbytes + slots.nbytes,
        check,
    )


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    run_on_card("layer_ops", measure, __doc__)
