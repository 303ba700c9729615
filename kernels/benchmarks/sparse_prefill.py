"""Measures sparse_prefill and write_rows: dense against torch's flash SDPA, sparse rows, short suffixes and decode.

The shape is one layer of Qwen2.5-7B (28 query heads, 4 KV heads, head dimension 128, bf16) in a pool of 28 layers whose
blocks are shuffled. Every output is checked before it is timed. `sparse_prefill_sweep` times other tiles.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from kernels.benchmarks.ceilings import copy_gbps, time_ms, wall_ms
from kernels.benchmarks.rows import Results, parser, require_cuda
from kernels.benchmarks.sparse_prefill_cases import GEOMETRY, HEADS, make_case, random_rows, sdpa_ms
from kernels.sparse_prefill import SequenceRows
from kernels.sparse_prefill.tiles import TileConfig, attention_work
from kernels.sparse_prefill.triton_attention import choose_config, processors_of
from kernels.sparse_prefill.triton_rows import write_rows

DENSE_TOKENS = (8192, 16384, 24576, 32768)
SPARSE_TOKENS = 24576
SPARSE_PERCENT = (1, 5, 10, 25)
SUFFIX_ROWS = 128


def measure_dense(results: Results, config: TileConfig | None) -> float:
    """Adds the rows of dense prefill; returns its milliseconds at SPARSE_TOKENS."""
    shares, reference = {}, 0.0
    for tokens in DENSE_TOKENS:
        case = make_case([torch.arange(tokens)])
        error = case.check(case.run(config))
        ours, flash = time_ms(partial(case.run, config), repeats=10), sdpa_ms(case)
        shares[tokens] = flash / ours
        if tokens == SPARSE_TOKENS:
            reference = ours
        baseline = f"torch SDPA flash: {flash:.3f} ms, {case.flops / flash / 1e9:.0f} TFLOP/s; error {error:.1e}"
        size = f"{tokens // 1024}k"
        results.add(f"dense_prefill_{size}_ms", ours, "ms", better="lower", baseline=baseline)
        tflops = case.flops / ours / 1e9
        results.add(f"dense_prefill_{size}_tflops", tflops, "TFLOP/s", better="higher", baseline=baseline)
        results.add(
            f"dense_prefill_share_of_sdpa_{size}",
            shares[tokens],
            "ratio",
            goal=0.70,
            better="higher",
            baseline=baseline,
        )
        try:
            cudnn = sdpa_ms(case, SDPBackend.CUDNN_ATTENTION)
            print(f"  for comparison, torch SDPA cuDNN: {cudnn:.3f} ms, {case.flops / cudnn / 1e9:.0f} TFLOP/s")
        except RuntimeError as refusal:
            print(f"  torch SDPA cuDNN does not run: {str(refusal).splitlines()[0]}")
    results.add(
        "dense_prefill_share_of_sdpa",
        min(shares.values()),
        "ratio",
        goal=0.70,
        better="higher",
        baseline=f"torch SDPA flash, the least of {', '.join(f'{tokens // 1024}k' for tokens in shares)}",
    )
    return reference


def measure_sparse(results: Results, config: TileConfig | None, dense_ms: float) -> None:
    """Adds the rows of random rows: time over (their share of the causal work x the dense time)."""
    whole = SPARSE_TOKENS * (SPARSE_TOKENS + 1) / 2
    for percent in SPARSE_PERCENT:
        case = make_case([random_rows(SPARSE_TOKENS, percent)])
        error = case.check(case.run(config))
        ours = time_ms(partial(case.run, config))
        share = case.attended / whole
        baseline = f"{share:.4f} of the causal work x dense {dense_ms:.3f} ms; error {error:.1e}"
        results.add(f"sparse_prefill_{percent}pct_ms", ours, "ms", better="lower", baseline=baseline)
        results.add(
            f"sparse_prefill_{percent}pct",
            ours / (share * dense_ms),
            "ratio",
            goal=1.6,
            better="lower",
            baseline=baseline,
        )


def measure_few_rows(results: Results, config: TileConfig | None, dense_ms: float) -> None:
    """Adds the rows of a short suffix and of decode, of one sequence and of eight."""
    last = torch.arange(SPARSE_TOKENS - SUFFIX_ROWS, SPARSE_TOKENS)
    case = make_case([last])
    error = case.check(case.run(config))
    share = case.attended / (SPARSE_TOKENS * (SPARSE_TOKENS + 1) / 2)
    ours = time_ms(partial(case.run, config))
    baseline = f"{share:.4f} of the causal work x dense {dense_ms:.3f} ms; error {error:.1e}"
    results.add(f"suffix_{SUFFIX_ROWS}_24k_ms", ours, "ms", better="lower", baseline=baseline)
    results.add(f"suffix_{SUFFIX_ROWS}_24k", ours / (share * dense_ms), "ratio", better="lower", baseline=baseline)
    started = time.perf_counter()
    for _ in range(100):
        case.run(config)
    host_us = (time.perf_counter() - started) * 1e4
    torch.cuda.synchronize()
    results.add("suffix_host_us", host_us, "us", better="lower", baseline="host time of one call, its plan made before")
    for name, batch in (("decode_24k", [SPARSE_TOKENS]), ("decode_32k", [32768]), ("decode_8x4k", [4096] * 8)):
        case = make_case([torch.tensor([tokens - 1]) for tokens in batch])
        error = case.check(case.run())
        ours = time_ms(case.run)
        read = sum(batch) * GEOMETRY.bytes_per_token(torch.bfloat16) / GEOMETRY.num_layers
        flash = f"torch SDPA flash {sdpa_ms(case):.3f} ms; " if len(batch) == 1 else ""
        baseline = f"{flash}copy {copy_gbps():.0f} GB/s; error {error:.1e}"
        results.add(f"{name}_ms", ours, "ms", better="lower", baseline=baseline)
        results.add(f"{name}_gbps", read / ours / 1e6, "GB/s", better="higher", baseline=baseline)


def measure_write(results: Results) -> None:
    """Adds the row of write_rows over all rows of a dense prefill, and checks what it wrote."""
    case = make_case([torch.arange(SPARSE_TOKENS)])
    k, v = torch.randn(
        2, SPARSE_TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim, device="cuda", dtype=torch.bfloat16
    ).unbind()

    def write() -> None:
        write_rows(k, v, case.pool, case.layer, case.sequences, GEOMETRY)

    write()
    if not torch.equal(case.dense_kv(case.sequences[0]).transpose(1, 2), torch.stack((k, v))):
        sys.exit("write_rows is wrong: the pool does not hold the rows")
    ours = time_ms(write)
    gbps = 4 * k.nbytes / ours / 1e6
    baseline = f"copy {copy_gbps():.0f} GB/s, read + written"
    results.add("write_rows_24k_ms", ours, "ms", better="lower", baseline=baseline)
    results.add("write_rows_24k_share_of_copy", gbps / copy_gbps(), "ratio", better="higher", baseline=baseline)


def measure_plans(results: Results) -> None:
    """Adds the host time that a stage spends before its first layer: rows checked and moved, the launch planned."""
    blocks = torch.randperm(SPARSE_TOKENS // GEOMETRY.block_size)
    group = HEADS // GEOMETRY.kv_heads
    processors = processors_of(torch.device("cuda", 0))
    for name, count in (("suffix", SUFFIX_ROWS), ("dense", SPARSE_TOKENS)):
        positions = torch.arange(SPARSE_TOKENS - count, SPARSE_TOKENS)
        config = choose_config(count * group, GEOMETRY.head_dim, torch.bfloat16)

        def plan(positions: torch.Tensor = positions, config: TileConfig = config) -> None:
            rows = (SequenceRows(0, positions, blocks).to("cuda"),)
            attention_work(rows, group, GEOMETRY.kv_heads, config, processors)

        results.add(
            f"plan_{name}_24k_us", wall_ms(plan) * 1e3, "us", better="lower", baseline="host time, once for all layers"
        )


def _config(text: str) -> TileConfig:
    return TileConfig(*(int(size) for size in text.split(",")))


def main() -> None:
    """Prints the figures, and writes them where `--json` says."""
    arguments = parser(__doc__)
    fields = ",".join(field.name for field in dataclasses.fields(TileConfig))
    arguments.add_argument("--config", type=_config, metavar=fields, help="tile of all rows but decode's")
    options = arguments.parse_args()
    require_cuda()
    torch.manual_seed(7)
    results = Results()
    dense_ms = measure_dense(results, options.config)
    measure_sparse(results, options.config, dense_ms)
    measure_few_rows(results, options.config, dense_ms)
    measure_write(results)
    measure_plans(results)
    results.write(options.json, "sparse_prefill")


if __name__ == "__main__":
    main()
