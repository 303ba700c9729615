"""How long does a newcomer wait for `make validate`, once the packages are there?

`python -m validation.benchmarks.validate` runs the validation as make does, each time in a process of its own with
nothing warm but the files that the system keeps in memory. Every gate has to hold.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from kernels.results import Count, Results, run_counted

MOST_SECONDS, RUNS = 75.0, 3
COMMAND = (sys.executable, "-m", "validation")


def waited(folder: Path) -> float:
    """Seconds that one run takes, with its files in `folder`. Raises CalledProcessError when a gate fails."""
    files = ("--output", str(folder / "report.json"), "--audit-path", str(folder / "audit.jsonl"))
    began = time.perf_counter()
    subprocess.run([*COMMAND, *files], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def run(runs: int, rows: Results) -> None:
    """Adds the row."""
    with tempfile.TemporaryDirectory() as folder:
        times = [waited(Path(folder)) for _ in range(runs)]
    told = ", ".join(f"{each:.1f}" for each in sorted(times))
    rows.add("validate_seconds", statistics.median(times), "s", f"make validate, median of {told} s", MOST_SECONDS)


main = partial(run_counted, "validate", __doc__, [Count("runs", RUNS, "runs, one after the other")], run)


if __name__ == "__main__":
    main()
