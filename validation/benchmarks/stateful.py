"""Steps of random lives in which nobody was served a stale byte and nothing was leaked.

`python -m validation.benchmarks.stateful` lives one life of equal length for each kind of engine, with admissions,
aborts, pauses and evictions, prints a table and writes its rows. Donors' KV carries a pattern that says whose it is.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from validation.benchmarks.random_life import CASES, random_life
from validation.benchmarks.recording import parser_of, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.benchmarks.ttft import Rows

logger = logging.getLogger(__name__)

STEPS = 100_000


def run(steps: int, rows: Rows) -> None:
    """Lives `steps` steps in all, and counts those of every life up to its first fault."""
    counts: Counter[str] = Counter()
    clean = 0
    for index, case in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder, random_life(case, Path(folder)) as life:
            share = steps // len(CASES) + (index < steps % len(CASES))
            try:
                for _ in range(share):
                    life.step()
                life.quiet()
            except Exception:
                logger.exception("%s went wrong after %d steps", case.name, life.counts["steps"])
                clean += min(life.counts["steps"], share - 1)
            else:
                clean += share
        counts += life.counts
    happened = ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in sorted(counts) if name != "steps")
    rows.add("stateful_steps_clean", clean, "steps", f"{len(CASES)} kinds of engine; {happened}", STEPS, "higher")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes."""
    parser = parser_of("stateful", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps in all; fewer than {STEPS} are a dry run")
    options = parser.parse_args(arguments)
    if options.steps < len(CASES):
        parser.error(f"--steps {options.steps} is too few; each of {len(CASES)} engines takes one at least")
    record(
        "stateful",
        options.json,
        {"steps": options.steps},
        lambda rows: run(options.steps, rows),
        dry=options.steps < STEPS,
    )


if __name__ == "__main__":
    main()
