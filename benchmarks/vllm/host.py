"""The host's time of one planned step in vLLM, beside that of stock's own eager step over the same rows.

`python -m benchmarks.vllm.host --json DIR` serves Qwen2.5-7B's shape with dummy weights in one engine. A step without a
plan is stock's: our forward hands it on. A plan is unchecked, or its sample passes. The card is idle before each step,
and the time ends when the forward returns. What the host waits for the card meanwhile is taken off. `--profile FILE`
writes what further planned steps spent, for pstats. `--small` is a dry run, for which no card is needed.
"""

import cProfile
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_model import NEW_TOKENS
from benchmarks.program import parser_of
from benchmarks.vllm.arm import SMALL, UNCHECKED, VERIFIED, VOLATILE, Sizes, VllmArm
from kernels.device import HostCopy
from validation.results import Results

# The host's time of a planned step over that of stock's.
GOAL = 1.5
_PLANS = {UNCHECKED: "planned", VOLATILE: "sampled"}
_STEPS, _WARM = 20, 5


class Watch:
    """Times the host in the engine's forwards: milliseconds of steps with a plan, and of those without, of some rows.
    A step that is profiled is not timed."""

    def __init__(self, rows: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group: Any = get_kv_transfer_group()
        self._forward = group._worker._forward
        self._run, self._plans = self._forward._run_step, self._forward._runtime.active_plans
        self._rows, self._waited = rows, 0.0
        self.profile: cProfile.Profile | None = None
        self.planned, self.stock = list[float](), list[float]()
        self._forward._run_step = self._timed
        read = HostCopy.read

        def waiting(copy: HostCopy) -> Any:
            began = time.perf_counter()
            found = read(copy)
            self._waited += time.perf_counter() - began
            return found

        HostCopy.read = waiting  # type: ignore[assignment, method-assign]

    def _timed(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        is_planned = len(self._plans) > 0
        rows = sum(each.tokens for each in self._forward.step.values())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.profile is not None and is_planned:
            return self.profile.runcall(self._run, arguments, options)
        self._waited = 0.0
        began = time.perf_counter()
        found = self._run(arguments, options)
        took = (time.perf_counter() - began - self._waited) * 1e3
        if is_planned:
            self.planned.append(took)
        elif rows == self._rows:
            self.stock.append(took)
        return found


def measure(arm: VllmArm, rows: Results, profile: cProfile.Profile | None) -> None:
    """Add all rows. Raises SystemExit if a prompt has no plan."""
    if problem := arm.begin():
        raise SystemExit(f"nothing is reused in this engine: {problem}")
    document = arm.prompts.document(arm.sizes.long)
    arm.save(arm.prompts.donor(document))
    watch, layers = Watch(NEW_TOKENS), arm.facts["layers"]
    for kind, name in _PLANS.items():
        arm.use_profile(kind)
        watch.planned, watch.stock, watch.profile = [], [], None
        for _ in range(_WARM + _STEPS):
            arm.ask(arm.prompts.shifted(document))
            arm.ask(arm.prompts.fresh(NEW_TOKENS))
        if len(watch.planned) < _WARM + _STEPS or len(watch.stock) < _WARM + _STEPS:
            raise SystemExit(f"{len(watch.planned)} steps had a plan and {len(watch.stock)} none; each needs {_STEPS}")
        planned, stock = (statistics.median(each[_WARM:]) for each in (watch.planned, watch.stock))
        shown = f"stock's eager step over {NEW_TOKENS} rows: {stock:.2f} ms; {layers} layers, {arm.sizes.long} tokens"
        rows.add(f"{name}_forward_host_ms", planned, "ms", shown, GOAL * stock)
        rows.add(f"{name}_forward_host_over_stock", planned / stock, "ratio", shown, GOAL)
        watch.profile = profile
        for _ in range(_STEPS if profile else 0):
            arm.ask(arm.prompts.shifted(document))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write cProfile's figures of the planned steps")
    parser.add_argument("--small", action="store_true", help="a dry run with a small model")
    options = parser.parse_args(arguments)
    profile = None if options.profile is None else cProfile.Profile()
    own = {"enforce_eager": True} | ({"block_size": 32} if options.small else {"gpu_memory_utilization": 0.8})
    sizes = SMALL if options.small else Sizes()
    rows = Results(arguments, "cuda" if torch.cuda.is_available() else "cpu", dry=options.small)
    with closing(VllmArm(VERIFIED, sizes, own)) as arm:
        measure(arm, rows, profile)
    if profile is not None:
        profile.dump_stats(options.profile)
    rows.write(options.json, "vllm_host")


if __name__ == "__main__":
    main()
