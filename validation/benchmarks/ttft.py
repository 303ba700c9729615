"""Time to first token: Transformers cold, the engine cold, without a donor, and behind shifted documents.

`python -m validation.benchmarks.ttft` makes the model on the spot, measures everything in one run, prints a table and
writes its rows. `--layers` is a dry run with a narrow model, which needs no card.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from validation.benchmarks import goals, measure
from validation.benchmarks.bench_model import make_runner
from validation.benchmarks.goals import label
from validation.benchmarks.measure import Bench, Hits
from validation.benchmarks.prompts import Prompts
from validation.machine import describe, versions
from validation.results import Measured, Row, row, today, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM
    from validation.results import Better

DEFAULT_FOLDER = Path("benchmarks/results/h200")
SIZES = (4_096, 8_192, 16_384, 24_576, 32_768)
DEVICE_DONORS, HOST_DONORS = 3, 3
MISS_PAIRS = 40


class Rows:
    """The rows of a run; those of a dry run have no goals."""

    def __init__(self, measured: Measured, dry: bool, console: Console) -> None:
        self.rows: list[Row] = []
        self._measured = measured
        self._dry = dry
        self._console = console

    def add(
        self, name: str, value: float, unit: str, baseline: str, goal: float | None = None, better: Better = "lower"
    ) -> None:
        """Adds a figure and shows it at once: a run that is cut short has shown what it measured."""
        goal = None if self._dry else goal
        self.rows.append(row(name, value, unit, goal=goal, better=better, baseline=baseline, measured=self._measured))
        self._console.print(f"{name}  {value:,.4g} {unit}", highlight=False)

    def table(self) -> Table:
        table = Table("row", "value", "unit", "goal", "holds", "measured against")
        for each in self.rows:
            goal = "" if each.goal is None else f"{'<=' if each.better == 'lower' else '>='} {each.goal:,.4g}"
            holds = "" if each.goal is None else "yes" if each.holds else "NO"
            table.add_row(each.name, f"{each.value:,.4g}", each.unit, goal, holds, each.baseline)
        return table


def run(bench: Bench, sizes: Sequence[int], rows: Rows) -> None:
    """Measures all rows. The baselines come first, while the model's projections are still its own."""
    link_gbps = _ceilings(rows)
    plain = {size: measure.transformers_cold(bench, size) for size in sizes}
    for size, milliseconds in plain.items():
        rows.add(f"transformers_cold_{label(size)}_ms", milliseconds, "ms", "Transformers, SDPA, KV cache on")
    device = {"POLICY": "position_fix", "HOST_BYTES": "0", "DEVICE_BYTES": str(bench.donor_bytes(DEVICE_DONORS))}
    with bench.engine(warm=False) as without, bench.engine(device) as connected:
        cold = _cold(bench, without, plain, rows)
        _miss(bench, without, connected, sizes, cold, rows)
        near = {size: measure.hits(bench, connected, size) for size in sizes}
    _shifted(near, cold, rows)
    host = {"POLICY": "position_fix", "HOST_BYTES": str(bench.donor_bytes(HOST_DONORS))}
    with bench.engine(host) as llm:
        far = {size: measure.hits(bench, llm, size) for size in sizes}
    _host(bench, far, near, link_gbps, rows)
    _boundary(bench, device, cold, sizes, rows)


def _ceilings(rows: Rows) -> float | None:
    """Measures the card; returns GB/s from pinned host memory, None without a card."""
    if not torch.cuda.is_available():
        return None
    from kernels.benchmarks import ceilings

    rows.add("ttft_copy_gbps", ceilings.copy_gbps(), "GB/s", "device copy, read + written", better="higher")
    rows.add("ttft_matmul_tflops", ceilings.matmul_tflops(), "TFLOP/s", "bf16 torch.mm", better="higher")
    link = ceilings.host_to_device_gbps()
    rows.add("ttft_host_to_device_gbps", link, "GB/s", "copy from pinned memory", better="higher")
    return link


def _cold(bench: Bench, llm: LLM, plain: dict[int, float], rows: Rows) -> dict[int, float]:
    unprepared = {size: measure.engine_cold(bench, llm, size) for size in plain}
    llm.warm_up(bench.sizes)
    cold = {size: measure.engine_cold(bench, llm, size) for size in plain}
    for size, milliseconds in cold.items():
        baseline = f"Transformers with SDPA {plain[size]:,.1f} ms"
        rows.add(f"cold_ttft_{label(size)}_ms", milliseconds, "ms", baseline, goals.cold_goal(size))
        baseline = f"{milliseconds:,.1f} ms after warm_up for this length"
        rows.add(f"cold_ttft_unprepared_{label(size)}_ms", unprepared[size], "ms", baseline)
    return cold


def _miss(bench: Bench, plain: LLM, connected: LLM, sizes: Sequence[int], cold: dict[int, float], rows: Rows) -> None:
    size = goals.MISS_SIZE if goals.MISS_SIZE in sizes else sizes[0]
    percent = measure.miss_overhead(bench, plain, connected, size, min(MISS_PAIRS, 8 * bench.repeats))
    baseline = f"the same engine without connector, {cold[size]:,.1f} ms; median of neighbouring pairs"
    rows.add(f"miss_overhead_{label(size)}", percent, "%", baseline, goals.MISS_OVERHEAD_PERCENT)


def _shifted(near: dict[int, Hits], cold: dict[int, float], rows: Rows) -> None:
    for size, found in near.items():
        baseline = f"cold {cold[size]:,.1f} ms; {found.reused} tokens reused, {found.computed} computed, donor near"
        rows.add(f"shifted_ttft_{label(size)}_ms", found.ttft, "ms", baseline, goals.SHIFTED_GOAL_MS.get(size))
        rows.add(f"shifted_ttft_{label(size)}_worst_ms", max(found.times), "ms", "slowest of the runs")
        rows.add(f"shifted_ttft_{label(size)}_first_ms", found.first, "ms", "the first prompt of this size")
        _split(f"shifted_{label(size)}", found, rows)
    low, high = goals.GROWTH_SIZES
    if low in near and high in near:
        growth, baseline = near[high].ttft / near[low].ttft, f"{near[high].ttft:.2f} over {near[low].ttft:.2f} ms"
        rows.add("shifted_ttft_growth_4k_32k", growth, "x", baseline, goals.SHIFTED_GROWTH)


def _host(bench: Bench, far: dict[int, Hits], near: dict[int, Hits], link_gbps: float | None, rows: Rows) -> None:
    token_bytes = bench.donor_bytes(1) / (bench.longest + 64)
    for size, found in far.items():
        rows.add(f"host_ttft_{label(size)}_ms", found.ttft, "ms", f"donor on the device {near[size].ttft:,.2f} ms")
        _split(f"host_{label(size)}", found, rows)
        if link_gbps is not None:
            transfer = found.reused * token_bytes / link_gbps / 1e6
            limit = max(transfer, near[size].ttft)
            baseline = f"the larger of {transfer:.2f} ms of transfer and {near[size].ttft:.2f} ms with the donor near"
            goal = goals.HOST_TIER_OVER_LIMIT if size == goals.GOAL_SIZE else None
            rows.add(f"host_tier_{label(size)}_over_limit", found.ttft / limit, "x", baseline, goal)


def _boundary(bench: Bench, device: dict[str, str], cold: dict[int, float], sizes: Sequence[int], rows: Rows) -> None:
    size = goals.GOAL_SIZE if goals.GOAL_SIZE in sizes else sizes[-1]
    layers = bench.runner.facts.num_layers
    boundary = min(goals.BOUNDARY_LAYER, layers - 1)
    variables = device | {"POLICY": "boundary", "RECOMPUTE_BOUNDARY_LAYER": str(boundary)}
    with bench.engine(variables) as llm:
        found = measure.hits(bench, llm, size)
    baseline = f"{found.ttft:,.2f} ms over cold {cold[size]:,.1f} ms; boundary {boundary} of {layers} layers"
    rows.add(f"boundary3_over_cold_{label(size)}", found.ttft / cold[size], "x", baseline, goals.BOUNDARY_OVER_COLD)
    _split(f"boundary3_{label(size)}", found, rows)


def _split(name: str, found: Hits, rows: Rows) -> None:
    for part, milliseconds in found.split.items():
        rows.add(f"{name}_{part}_ms", milliseconds, "ms", "its share in the time, another run")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m validation.benchmarks.ttft", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="DIR", help=f"where ttft.json is written ({DEFAULT_FOLDER})")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tokens of the prompts")
    parser.add_argument("--layers", type=int, help="a dry run: a narrow model of so many layers, no goals")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count for a median")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and options.layers is None:
        parser.error("torch sees no CUDA device; --layers 2 --sizes 512 768 is a dry run without one")
    command = "python -m validation.benchmarks.ttft" + "".join(
        f" --{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in (("sizes", options.sizes), ("layers", options.layers), ("repeats", options.repeats))
        if value is not None
    )
    console = Console()
    rows = Rows(Measured(command, describe(device), versions(), today()), options.layers is not None, console)
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(Path(folder), device, options.layers)
        prompts = Prompts(int(runner.config.vocab_size))
        run(Bench(runner, Path(folder), options.repeats, prompts, tuple(options.sizes)), options.sizes, rows)
    console.print(rows.table())
    target = options.json or (None if options.layers is not None else DEFAULT_FOLDER)
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        write_rows(target / "ttft.json", rows.rows)


if __name__ == "__main__":
    main()
