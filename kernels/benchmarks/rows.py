"""Result rows of the kernels' benchmarks, with the keys that `validation.results.Row` reads."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch


@dataclass(slots=True)
class Results:
    """The rows of one run; they share the command line, the machine, the versions and the date (UTC, ISO 8601)."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    common: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.common = {"command": command(), "machine": machine(), "versions": versions(), "date": _today()}

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        goal: float | None = None,
        better: Literal["higher", "lower"],
        baseline: str,
    ) -> None:
        """Adds one figure and prints it; `baseline` says what it is measured against.

        Raises ValueError when the value is not finite.
        """
        if not math.isfinite(value):
            raise ValueError(f"the row {name} has the value {value}; a result is a finite number")
        holds = goal is None or (value >= goal if better == "higher" else value <= goal)
        self.rows.append(
            {
                "name": name,
                "value": value,
                "unit": unit,
                "goal": goal,
                "better": better,
                "holds": holds,
                "baseline": baseline,
                **self.common,
            }
        )
        verdict = "" if goal is None else f"  goal {'>=' if better == 'higher' else '<='} {goal:g}"
        say(f"{name:<44} {value:>12,.5g} {unit:<10}{verdict}{'' if holds else '  MISSED'}")

    def write(self, folder: Path | None, name: str) -> None:
        """Writes the rows to `folder/name.json`, replacing an earlier run's; nothing when `folder` is None."""
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(self.rows, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        say(f"wrote {len(self.rows)} rows to {path}")


def say(line: str) -> None:
    """Shows one line at once, so that a run that is cut short has shown what it measured."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", type=Path, metavar="DIR", help="write the rows to DIR/<benchmark>.json")
    return arguments


def require_cuda() -> None:
    """Ends the program with one sentence when there is no CUDA device."""
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device, and torch sees none.")


def command() -> str:
    """The command line of this run, as a reader can repeat it."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"python -m {module.name}" if module is not None else f"python {sys.argv[0]}"
    return " ".join((program, *(shlex.quote(argument) for argument in sys.argv[1:])))


def machine() -> dict[str, Any]:
    """The machine that this process runs on."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "name": gpu.name if gpu else f"cpu-{os.cpu_count()}core",
        "gpu": gpu.name if gpu else None,
        "gpu_memory_gib": round(gpu.total_memory / 2**30, 1) if gpu else None,
        "multiprocessors": gpu.multi_processor_count if gpu else None,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Python, CUDA and the distributions that decide a kernel's speed, as far as they are installed."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("semblend-trt", "torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
