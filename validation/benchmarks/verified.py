"""Time to first token of a checked plan in which nothing deviates, against a cold prefill, and where it goes.

`python -m validation.benchmarks.verified` makes the model on the spot, measures in one run, prints a table and writes
its rows. `--layers` is a dry run with a narrow model, which needs no card.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from engine_wrapper.embedded.llm_args import LlmArgs
from semblend_trt.span_check import SpanCheck
from validation.benchmarks import goals, measure
from validation.benchmarks.bench_model import make_runner
from validation.benchmarks.checked_stopwatch import PARTS, CheckedStopwatch
from validation.benchmarks.goals import label
from validation.benchmarks.measure import Bench
from validation.benchmarks.prompts import Prompts
from validation.benchmarks.ttft import DEFAULT_FOLDER, Rows
from validation.machine import describe, versions
from validation.results import Measured, today, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM
    from semblend_trt.plan import SemanticKvPlan

VERIFIED_OVER_COLD = 0.13
CHECK_LAYER = 2
DONORS = 3
# Above every deviation, and finite as a threshold must be.
KEEP_ALL = 1e30


def run(bench: Bench, size: int, check_layer: int, rows: Rows) -> None:
    """Measures all rows, the baseline first."""
    check = SpanCheck(check_layer, KEEP_ALL)
    variables = {"POLICY": "position_fix", "HOST_BYTES": "0", "DEVICE_BYTES": str(bench.donor_bytes(DONORS))}
    with bench.engine() as plain:
        cold = measure.engine_cold(bench, plain, size)
    with bench.engine(variables) as llm:
        check_every_plan(llm, check)
        llm.executor.model_runner.warm_up((size,), (check_layer,))
        found = measure.hits(bench, llm, size, CheckedStopwatch, PARTS)
    at_once = min(LlmArgs.model_fields["max_num_tokens"].default, size // 3)
    with bench.engine(variables, max_num_tokens=at_once) as llm:
        check_every_plan(llm, check)
        in_parts = measure.hits(bench, llm, size)
    name, layers = label(size), bench.runner.facts.num_layers
    rows.add(f"verified_cold_ttft_{name}_ms", cold, "ms", "the engine without connector")
    kept = "random weights give other KV at other positions, so the threshold of 1e30 keeps whatever deviates"
    baseline = f"{found.ttft:,.2f} ms over cold {cold:,.1f} ms; check layer {check_layer} of {layers}; {kept}"
    rows.add(f"verified_over_cold_{name}", found.ttft / cold, "x", baseline, VERIFIED_OVER_COLD)
    baseline = f"cold {cold:,.1f} ms; {found.reused} tokens reused, {found.computed} computed, donor near"
    rows.add(f"verified_ttft_{name}_ms", found.ttft, "ms", baseline)
    baseline = f"the same, but at most {at_once} tokens in a forward; cold in one forward {cold:,.1f} ms"
    rows.add(f"verified_ttft_{name}_in_parts_ms", in_parts.ttft, "ms", baseline)
    rows.add(f"verified_ttft_{name}_worst_ms", max(found.times), "ms", "slowest of the runs")
    rows.add(f"verified_ttft_{name}_first_ms", found.first, "ms", "the first prompt of this size")
    for part in PARTS:
        rows.add(f"verified_{name}_{part}_ms", found.split[part], "ms", "its share in the time, another run")


def check_every_plan(llm: LLM, check: SpanCheck) -> None:
    """Gives plans a check that no reuse profile may justify: random weights cannot be calibrated."""
    runner = llm.executor.model_runner
    take = runner.plan_source
    assert take is not None

    def take_checked(request_id: int) -> SemanticKvPlan | None:
        plan = take(request_id)
        return plan and replace(plan, execution=replace(plan.execution, check=check))

    runner.plan_source = take_checked


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m validation.benchmarks.verified", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="DIR", help=f"where verified.json is written ({DEFAULT_FOLDER})")
    parser.add_argument("--size", type=int, default=goals.GOAL_SIZE, help="tokens of the prompts")
    parser.add_argument("--check-layer", type=int, default=CHECK_LAYER, help="layer of the comparison")
    parser.add_argument("--layers", type=int, help="a dry run: a narrow model of so many layers, no goals")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count for a median")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and options.layers is None:
        parser.error("torch sees no CUDA device; --layers 4 --size 768 is a dry run without one")
    command = "python -m validation.benchmarks.verified" + "".join(
        f" --{name.replace('_', '-')} {getattr(options, name)}"
        for name in ("size", "check_layer", "layers", "repeats")
        if getattr(options, name) is not None
    )
    console = Console()
    rows = Rows(Measured(command, describe(device), versions(), today()), options.layers is not None, console)
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(Path(folder), device, options.layers)
        if not 0 <= options.check_layer < runner.facts.num_layers:
            parser.error(f"--check-layer {options.check_layer} is outside 0..{runner.facts.num_layers - 1}")
        prompts = Prompts(int(runner.config.vocab_size))
        run(
            Bench(runner, Path(folder), options.repeats, prompts, (options.size,)),
            options.size,
            options.check_layer,
            rows,
        )
    console.print(rows.table())
    target = options.json or (None if options.layers is not None else DEFAULT_FOLDER)
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        write_rows(target / "verified.json", rows.rows)


if __name__ == "__main__":
    main()
