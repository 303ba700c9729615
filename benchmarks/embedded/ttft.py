"""Time to first token: Transformers cold, the engine cold, without a donor, and behind shifted documents.

`python -m benchmarks.embedded.ttft` makes a random model and measures everything in one run. `--layers` is a dry run
with a narrow model, which needs no card.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.embedded.bench_model import GOAL_SIZE, MISS_SIZE, Bench, Hits, label, run_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM
    from validation.results import Results

SIZES = (4_096, 8_192, 16_384, 24_576, 32_768)
DEVICE_DONORS, HOST_DONORS = 3, 3
MISS_PAIRS = 40
# vLLM 0.25.1, bf16, the same shape, eager, prefix caching on, wall time of generate() with one new token; ms by prompt
# tokens. The goals stand for the sizes at which they were set.
VLLM_COLD_MS = {24_576: 708.1, 32_768: 1_031.3}
SHIFTED_GOAL_MS = {4_096: 5.5, 24_576: 8.5, 32_768: 22.0}

COLD_OVER_VLLM = 1.10
SHIFTED_GROWTH = 1.8
MISS_OVERHEAD_PERCENT = 0.5
HOST_TIER_OVER_LIMIT = {4_096: 1.25, 8_192: 1.25, GOAL_SIZE: 1.2}
BOUNDARY_OVER_COLD = 0.15
GROWTH_SIZES = (4_096, 32_768)
BOUNDARY_LAYER = 3


def run(bench: Bench, rows: Results, sizes: Sequence[int]) -> None:
    """Measures all rows, Transformers first."""
    link_gbps = _ceilings(rows)
    plain = {size: bench.transformers_cold(size) for size in sizes}
    for size, milliseconds in plain.items():
        rows.add(f"transformers_cold_{label(size)}_ms", milliseconds, "ms", "Transformers, SDPA, KV cache on")
    with bench.engine() as without, bench.engine(bench.donors_in("DEVICE", DEVICE_DONORS)) as connected:
        cold = _cold(bench, without, plain, rows)
        _miss(bench, without, connected, sizes, cold, rows)
        near = {size: bench.hits(connected, size) for size in sizes}
    _shifted(near, cold, rows)
    with bench.engine(bench.donors_in("HOST", HOST_DONORS)) as llm:
        far = {size: bench.hits(llm, size) for size in sizes}
    _host(bench, far, near, link_gbps, rows)
    _boundary(bench, cold, sizes, rows)


def _ceilings(rows: Results) -> float | None:
    """Measures the card; returns GB/s from pinned host memory, None without a card."""
    if not torch.cuda.is_available():
        return None
    from benchmarks.kernels import ceilings

    rows.add("ttft_copy_gbps", ceilings.copy_gbps(), "GB/s", "device copy, read + written", better="higher")
    rows.add("ttft_matmul_tflops", ceilings.matmul_tflops(), "TFLOP/s", "bf16 torch.mm", better="higher")
    link = ceilings.host_gbps(to_device=True)
    rows.add("ttft_host_to_device_gbps", link, "GB/s", "copy from pinned memory", better="higher")
    return link


def _cold(bench: Bench, llm: LLM, plain: dict[int, float], rows: Results) -> dict[int, float]:
    cold = {size: bench.cold(llm, size) for size in plain}
    for size, milliseconds in cold.items():
        baseline = f"Transformers with SDPA {plain[size]:,.1f} ms"
        rows.add(f"cold_ttft_{label(size)}_ms", milliseconds, "ms", baseline, cold_goal(size))
    return cold


def _miss(
    bench: Bench, plain: LLM, connected: LLM, sizes: Sequence[int], cold: dict[int, float], rows: Results
) -> None:
    size = MISS_SIZE if MISS_SIZE in sizes else sizes[0]
    percent = bench.miss_overhead(plain, connected, size, min(MISS_PAIRS, 8 * bench.repeats))
    baseline = f"the same engine without connector, {cold[size]:,.1f} ms; median of neighbouring pairs"
    rows.add(f"miss_overhead_{label(size)}", percent, "%", baseline, MISS_OVERHEAD_PERCENT)


def _shifted(near: dict[int, Hits], cold: dict[int, float], rows: Results) -> None:
    for size, found in near.items():
        baseline = f"cold {cold[size]:,.1f} ms; {found.sentence()}"
        rows.add(f"shifted_ttft_{label(size)}_ms", found.ttft, "ms", baseline, SHIFTED_GOAL_MS.get(size))
        rows.add(f"shifted_ttft_{label(size)}_worst_ms", max(found.times), "ms", "slowest of the runs")
        rows.add(f"shifted_ttft_{label(size)}_first_ms", found.first, "ms", "the first prompt of this size")
        found.add_split(rows, f"shifted_{label(size)}")
    low, high = GROWTH_SIZES
    if low in near and high in near:
        growth, baseline = near[high].ttft / near[low].ttft, f"{near[high].ttft:.2f} over {near[low].ttft:.2f} ms"
        rows.add("shifted_ttft_growth_4k_32k", growth, "x", baseline, SHIFTED_GROWTH)


def _host(bench: Bench, far: dict[int, Hits], near: dict[int, Hits], link_gbps: float | None, rows: Results) -> None:
    token_bytes = bench.donor_bytes(1) / (bench.longest + 64)
    for size, found in far.items():
        rows.add(f"host_ttft_{label(size)}_ms", found.ttft, "ms", f"donor on the device {near[size].ttft:,.2f} ms")
        found.add_split(rows, f"host_{label(size)}")
        if link_gbps is not None:
            transfer = found.reused * token_bytes / link_gbps / 1e6
            limit = max(transfer, near[size].ttft)
            baseline = f"the larger of {transfer:.2f} ms of transfer and {near[size].ttft:.2f} ms with the donor near"
            goal = HOST_TIER_OVER_LIMIT.get(size)
            rows.add(f"host_tier_{label(size)}_over_limit", found.ttft / limit, "x", baseline, goal)


def _boundary(bench: Bench, cold: dict[int, float], sizes: Sequence[int], rows: Results) -> None:
    size = GOAL_SIZE if GOAL_SIZE in sizes else sizes[-1]
    layers = bench.runner.facts.num_layers
    boundary = min(BOUNDARY_LAYER, layers - 1)
    variables = bench.donors_in("DEVICE", DEVICE_DONORS, "boundary")
    with bench.engine(variables | {"RECOMPUTE_BOUNDARY_LAYER": str(boundary)}) as llm:
        found = bench.hits(llm, size)
    baseline = f"{found.ttft:,.2f} ms over cold {cold[size]:,.1f} ms; boundary {boundary} of {layers} layers"
    rows.add(f"boundary3_over_cold_{label(size)}", found.ttft / cold[size], "x", baseline, BOUNDARY_OVER_COLD)
    found.add_split(rows, f"boundary3_{label(size)}")


def cold_goal(size: int) -> float | None:
    """Milliseconds, None where none is set."""
    vllm = VLLM_COLD_MS.get(size)
    return None if vllm is None else COLD_OVER_VLLM * vllm


_SETTINGS = {"sizes": (SIZES, "tokens of the prompts")}
main = partial(run_model, "ttft", __doc__, run, "--layers 2 --sizes 512 768", _SETTINGS)


if __name__ == "__main__":
    main()
