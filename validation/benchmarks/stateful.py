"""Steps of random lives in which nobody was served a stale byte and nothing was leaked.

`python -m validation.benchmarks.stateful` lives one life for each kind of engine, with admissions, aborts, pauses and
evictions, and one for each habit of TensorRT-LLM's versions, with forwards that fail and saves that lag behind. It
prints a table and writes its rows. Donors' KV carries a pattern that says whose it is.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from validation.benchmarks.life_cases import CASES, HABIT_CASES
from validation.benchmarks.random_life import random_life
from validation.benchmarks.recording import parser_of, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.benchmarks.life_cases import Case
    from validation.benchmarks.ttft import Rows

logger = logging.getLogger(__name__)

STEPS = 100_000
# What cancelled requests that nobody tells of must leave to others.
HITS = 2_400


@dataclass(slots=True)
class Lives:
    """What came of several lives: their `clean` steps up to the first fault of each, and what happened in them."""

    clean: int = 0
    wrong_tokens: int = 0
    leaked_blocks: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, steps: int) -> None:
        """Lives one more."""
        with tempfile.TemporaryDirectory() as folder, random_life(case, Path(folder)) as life:
            try:
                for _ in range(steps):
                    life.step()
                life.quiet()
            except Exception:
                logger.exception("%s went wrong after %d steps", case.name, life.counts["steps"])
                self.clean += min(life.counts["steps"], steps - 1)
            else:
                self.clean += steps
        self.counts += life.counts
        self.wrong_tokens += life.wrong_tokens
        self.leaked_blocks += life.leaked_blocks

    @property
    def happened(self) -> str:
        names = sorted(name for name in self.counts if name != "steps")
        return ", ".join(f"{self.counts[name]:,} {name.replace('_', ' ')}" for name in names)


def run(steps: int, rows: Rows) -> None:
    """Lives `steps` steps in the engines without habits, and as many in each of the others as in one of these."""
    plain, habits = Lives(), Lives()
    for index, case in enumerate(CASES):
        plain.add(case, steps // len(CASES) + (index < steps % len(CASES)))
    for case in HABIT_CASES:
        habits.add(case, steps // len(CASES))
    lived = steps + len(HABIT_CASES) * (steps // len(CASES))
    kinds = f"{len(CASES)} kinds of engine; {plain.happened}"
    habitual = f"{len(HABIT_CASES)} engines with habits; {habits.happened}"
    rows.add("stateful_steps_clean", plain.clean + habits.clean, "steps", f"{kinds}; {habitual}", lived, "higher")
    rows.add("stateful_hits", plain.counts["hits"], "requests", kinds, HITS, "higher")
    rows.add("trtllm_habits_wrong_tokens", habits.wrong_tokens, "tokens", habitual, 0)
    rows.add("trtllm_habits_leaked_blocks", habits.leaked_blocks, "blocks", habitual, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes."""
    parser = parser_of("stateful", __doc__)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"steps of engines without habits; fewer than {STEPS} are a dry run"
    )
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
