"""Measures sparse_prefill and write_rows: dense against torch's flash SDPA, sparse rows, suffixes, windows and decode.

The shape is one layer of Qwen2.5-7B (28 query heads, 4 KV heads, head dimension 128, bf16) in a pool of 28 layers whose
blocks are shuffled. Every output is checked before it is timed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.ceilings import (
    QWEN_7B,
    add_share,
    check_close,
    copy_gbps,
    run_on_card,
    time_ms,
    wall_ms,
)
from kernels.layout import PoolLayer, indexable, pool_view
from kernels.sparse_prefill import SequenceRows
from kernels.sparse_prefill.tiles import TileConfig, attention_work
from kernels.sparse_prefill.triton_attention import choose_config, processors_of, sparse_prefill, write_rows
from validation.results import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.results import Results

HEADS = 28
LAYER, SCALE = 14, float(QWEN_7B.head_dim**-0.5)
MAX_ERROR = 1e-2
DENSE_TOKENS = (8192, 16384, 24576, 32768)
SPARSE_TOKENS = 24576
SPARSE_PERCENT = (1, 5, 10, 25)
SUFFIX_ROWS = 128
FP8 = torch.float8_e4m3fn
# Of a decode step the dtype of KV, under queries in bf16, and each sequence's tokens.
DECODE = {
    "decode_24k": (torch.bfloat16, [SPARSE_TOKENS]),
    "decode_24k_fp8": (FP8, [SPARSE_TOKENS]),
    "decode_32k": (torch.bfloat16, [32768]),
    "decode_8x4k": (torch.bfloat16, [4096] * 8),
}
WINDOW = 128  # that of gpt-oss
SDPA_GOAL, SPARSE_GOAL = 0.70, 1.6


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one or more sequences of random KV in a pool, on the card."""

    q: torch.Tensor
    pool: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    window: int | None = None
    sinks: torch.Tensor | None = None

    @property
    def attended(self) -> int:
        """Pairs of a row and a token that it attends to, of one head."""
        seen = (sequence.host_positions + 1 for sequence in self.sequences)
        return sum(int((own if self.window is None else own.clamp(max=self.window)).sum()) for own in seen)

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products, of all heads."""
        return 4.0 * self.attended * self.q.shape[1] * QWEN_7B.head_dim

    def run(self) -> torch.Tensor:
        """One launch."""
        kv = PoolLayer(self.pool, LAYER, QWEN_7B)
        return sparse_prefill(self.q, kv, self.sequences, SCALE, self.window, self.sinks)

    def check(self, output: torch.Tensor) -> float:
        """Relative error of some rows of each sequence against float64 attention; ends the program if it is large."""
        worst = 0.0
        for sequence in self.sequences:
            own = torch.linspace(0, sequence.count - 1, min(sequence.count, 16)).long()
            # keys, values: [kv_heads, tokens, head_dim]
            keys, values = self.dense_kv(sequence).double()
            rows = (sequence.first_row + own).to(self.q.device)
            group = self.q.shape[1] // QWEN_7B.kv_heads
            queries = self.q[rows].double().unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
            positions = sequence.host_positions[own].to(self.q.device).repeat(group)
            behind = positions[:, None] - torch.arange(keys.shape[1], device=keys.device)
            unseen = (behind < 0) | (behind >= (self.window or keys.shape[1]))
            scores = (queries @ keys.transpose(1, 2) * SCALE).masked_fill(unseen, -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.double().view(-1, group).repeat_interleave(len(own), 1)[..., None]
                scores = torch.cat((scores, sinks), dim=-1)
            weights = scores.softmax(-1)[..., : keys.shape[1]]
            expected = (weights @ values).unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
            worst = max(worst, check_close("sparse_prefill", output[rows], expected, MAX_ERROR))
        return worst

    def dense_kv(self, sequence: SequenceRows) -> torch.Tensor:
        """[2, kv_heads, tokens, head_dim] of one sequence, gathered."""
        blocks = indexable(pool_view(self.pool, QWEN_7B))[sequence.block_ids, LAYER].view(self.pool.dtype)
        return blocks.to(self.q.dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : sequence.last_position + 1]


def make_case(positions: Sequence[torch.Tensor], kv_dtype: torch.dtype = torch.bfloat16) -> Case:
    """A case with the given positions of each sequence, in blocks of its own, shuffled."""
    generator = torch.Generator().manual_seed(7)
    needed = [QWEN_7B.blocks_for(int(own[-1]) + 1) for own in positions]
    blocks = torch.randperm(sum(needed), generator=generator).split(needed)
    shape = (sum(needed), QWEN_7B.num_layers, 2, QWEN_7B.row_elements)
    pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kv_dtype)
    sequences, rows = [], 0
    for own, ids in zip(positions, blocks, strict=True):
        sequences.append(SequenceRows(rows, own, ids).to("cuda"))
        rows += len(own)
    q = torch.randn(rows, HEADS, QWEN_7B.head_dim, device="cuda", dtype=torch.bfloat16)
    return Case(q, pool, tuple(sequences))


def random_rows(tokens: int, percent: int) -> torch.Tensor:
    """Sorted positions of `percent` per cent of `tokens`, the last token always among them."""
    chosen = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(percent))
    return torch.cat((chosen[: tokens * percent // 100 - 1].sort().values, torch.tensor([tokens - 1])))


def sdpa_ms(case: Case, backend: SDPBackend = SDPBackend.FLASH_ATTENTION) -> float:
    """Milliseconds of torch's causal attention on the same queries, K and V, gathered beforehand."""
    # keys, values: [1, kv_heads, tokens, head_dim]
    keys, values = (kind[None].contiguous() for kind in case.dense_kv(case.sequences[0]))
    queries = case.q.transpose(0, 1)[None].contiguous()
    causal = queries.shape[2] > 1

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(queries, keys, values, is_causal=causal, scale=SCALE, enable_gqa=True)

    return time_ms(attend, repeats=10)


def measure_dense(results: Results) -> float:
    """Adds the rows of dense prefill; returns its milliseconds at SPARSE_TOKENS."""
    times, shares = {}, {}
    for tokens in DENSE_TOKENS:
        case, size = make_case([torch.arange(tokens)]), f"{tokens // 1024}k"
        error = case.check(case.run())
        times[tokens], flash = time_ms(case.run, repeats=10), sdpa_ms(case)
        shares[size] = flash / times[tokens]
        baseline = f"torch SDPA flash: {flash:.3f} ms, {case.flops / flash / 1e9:.0f} TFLOP/s; error {error:.1e}"
        results.add(f"dense_prefill_{size}_ms", times[tokens], "ms", baseline)
        tflops = case.flops / times[tokens] / 1e9
        results.add(f"dense_prefill_{size}_tflops", tflops, "TFLOP/s", baseline, better="higher")
        results.add(f"dense_prefill_share_of_sdpa_{size}", shares[size], "ratio", baseline, SDPA_GOAL, "higher")
        try:
            cudnn = sdpa_ms(case, SDPBackend.CUDNN_ATTENTION)
            say(f"  for comparison, torch SDPA cuDNN: {cudnn:.3f} ms, {case.flops / cudnn / 1e9:.0f} TFLOP/s")
        except RuntimeError as refusal:
            say(f"  torch SDPA cuDNN does not run: {str(refusal).splitlines()[0]}")
    baseline = f"torch SDPA flash, the least of {', '.join(shares)}"
    results.add("dense_prefill_share_of_sdpa", min(shares.values()), "ratio", baseline, SDPA_GOAL, "higher")
    return times[SPARSE_TOKENS]


def measure_rows(results: Results, name: str, case: Case, dense_ms: float, goal: float | None = None) -> None:
    """Adds the rows of some rows of SPARSE_TOKENS: time over (their share of the causal work x the dense time)."""
    error = case.check(case.run())
    ours, share = time_ms(case.run), case.attended / (SPARSE_TOKENS * (SPARSE_TOKENS + 1) / 2)
    baseline = f"{share:.4f} of the causal work x dense {dense_ms:.3f} ms; error {error:.1e}"
    results.add(f"{name}_ms", ours, "ms", baseline)
    results.add(name, ours / (share * dense_ms), "ratio", baseline, goal)


def measure_few_rows(results: Results, dense_ms: float) -> None:
    """Adds the rows of random rows, of a short suffix, and of decode of one sequence and of eight; of some in fp8."""
    for percent in SPARSE_PERCENT:
        case = make_case([random_rows(SPARSE_TOKENS, percent)])
        measure_rows(results, f"sparse_prefill_{percent}pct", case, dense_ms, SPARSE_GOAL)
    suffix = [torch.arange(SPARSE_TOKENS - SUFFIX_ROWS, SPARSE_TOKENS)]
    measure_rows(results, f"suffix_{SUFFIX_ROWS}_24k_fp8", make_case(suffix, FP8), dense_ms)
    case = make_case(suffix)
    measure_rows(results, f"suffix_{SUFFIX_ROWS}_24k", case, dense_ms)
    started = time.perf_counter()
    for _ in range(100):
        case.run()
    host_us = (time.perf_counter() - started) * 1e4
    torch.cuda.synchronize()
    results.add("suffix_host_us", host_us, "us", "host time of one call, its plan made before")
    for name, (kv_dtype, batch) in DECODE.items():
        case = make_case([torch.tensor([tokens - 1]) for tokens in batch], kv_dtype)
        error = case.check(case.run())
        ours = time_ms(case.run)
        read = sum(batch) * QWEN_7B.bytes_per_token(kv_dtype) / QWEN_7B.num_layers
        flash = f"torch SDPA flash {sdpa_ms(case):.3f} ms; " if len(batch) == 1 else ""
        baseline = f"{flash}copy {copy_gbps():.0f} GB/s; error {error:.1e}"
        results.add(f"{name}_ms", ours, "ms", baseline)
        results.add(f"{name}_gbps", read / ours / 1e6, "GB/s", baseline, better="higher")


def measure_window(results: Results, dense_ms: float) -> None:
    """Adds the row of all rows of SPARSE_TOKENS in a window with sinks, over its share of the dense time."""
    whole = make_case([torch.arange(SPARSE_TOKENS)])
    case = replace(whole, window=WINDOW, sinks=torch.randn(HEADS, device="cuda", dtype=torch.bfloat16))
    measure_rows(results, f"window_{WINDOW}_with_sinks_24k", case, dense_ms)


def measure_write(results: Results) -> None:
    """Adds the row of write_rows over all rows of a dense prefill, and checks what it wrote."""
    case = make_case([torch.arange(SPARSE_TOKENS)])
    k, v = torch.randn(
        2, SPARSE_TOKENS, QWEN_7B.kv_heads, QWEN_7B.head_dim, device="cuda", dtype=torch.bfloat16
    ).unbind()

    write = partial(write_rows, k, v, PoolLayer(case.pool, LAYER, QWEN_7B), case.sequences)
    write()
    if not torch.equal(case.dense_kv(case.sequences[0]).transpose(1, 2), torch.stack((k, v))):
        sys.exit("write_rows is wrong: the pool does not hold the rows")
    ours = time_ms(write)
    results.add("write_rows_24k_ms", ours, "ms", f"copy {copy_gbps():.0f} GB/s, read + written")
    add_share(results, "write_rows_24k", ours, 4 * k.nbytes)


def measure_plans(results: Results) -> None:
    """Adds the host time that a stage spends before its first layer: rows checked and moved, the launch planned."""
    blocks = torch.randperm(SPARSE_TOKENS // QWEN_7B.block_size)
    group = HEADS // QWEN_7B.kv_heads
    processors = processors_of(torch.device("cuda", 0))
    for name, count in (("suffix", SUFFIX_ROWS), ("dense", SPARSE_TOKENS)):
        positions = torch.arange(SPARSE_TOKENS - count, SPARSE_TOKENS)
        config = choose_config(count * group, QWEN_7B.head_dim, torch.bfloat16)

        def plan(positions: torch.Tensor = positions, config: TileConfig = config) -> None:
            rows = (SequenceRows(0, positions, blocks).to("cuda"),)
            attention_work(rows, group, QWEN_7B.kv_heads, config, processors)

        results.add(f"plan_{name}_24k_us", wall_ms(plan) * 1e3, "us", "host time, once for all layers")


def measure(results: Results) -> None:
    """Adds all rows."""
    dense_ms = measure_dense(results)
    measure_few_rows(results, dense_ms)
    measure_window(results, dense_ms)
    measure_write(results)
    measure_plans(results)


if __name__ == "__main__":
    run_on_card("sparse_prefill", measure, __doc__)
