"""Minutes in which an engine under a gentle load gave no wrong answer and grew neither memory, descriptors nor threads.

`python -m benchmarks.evidence.soak` serves the shipped model with tiers in memory and on disk, so small that they are
full within minutes. Two tenants ask with shared and with new documents about once a second; some requests end early.
Answers are compared with a cold engine's.

Every 10 s, between requests, the private memory, the descriptors and the threads of the process are sampled. Samples
are noisy, so five minutes make one figure: the median of memory, the minimum of descriptors and threads, since those of
files come and go, while leaked ones stay. Minutes 5 to 10 are the base. A later minute holds when the five minutes
before it are at most 2 % above the base. The row counts the minutes up to the last one that holds, and before the first
wrong answer.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.program import Count, run_counted
from engine_wrapper.embedded.sampling import SamplingParams
from validation.documents import stock_list
from validation.embedded_engine import disk_tier, open_cold, open_llm
from validation.models import load, shipped_model
from validation.prompts import render
from validation.results import say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine_wrapper.embedded.llm import LLM
    from validation.results import Results

MINUTES, LEAST_MINUTES = 31, 30
MINUTE_SECONDS, SAMPLE_SECONDS, TURN_SECONDS = 60.0, 10.0, 1.0
# Minutes before the base is taken, and minutes of one figure.
WARM_UP, WINDOW = 5, 5
GROWTH_PERCENT = 2.0
# What is sampled, and how one figure is made of five minutes.
FIGURES: dict[str, Callable[[list[int]], float]] = {"memory": statistics.median, "descriptors": min, "threads": min}
TENANTS = ("acme", "globex")
# The first answers are all compared, later ones at random.
COMPARED_FIRST, COMPARED_SHARE = 20, 0.1
POOL_TOKENS, DOCUMENTS, ROWS = 2048, 8, 8
# Tokens that an answer has, and that a request asks for which ends early.
ANSWER, ENDED = SamplingParams(max_tokens=8), SamplingParams(max_tokens=64, ignore_eos=True)
# The load reaches all of these bounds, and that of the disk, before the base is taken.
SETTINGS = {
    "POLICY": "exact",
    "HOST_BYTES": str(32 << 20),
    "STAGING_BYTES": str(16 << 20),
    "SNAPSHOT_BYTES": str(32 << 20),
    "MAX_DONORS": "48",
}
DISK_BYTES = 64 << 20
# Kinds of requests and their weights.
KINDS = {"shared": 9, "new": 4, "streamed": 3, "ended": 4}


@dataclass(frozen=True, slots=True)
class Sample:
    """The process's bytes, descriptors and threads by name, at a minute of the run."""

    minute: float
    held: Mapping[str, int]


@dataclass(slots=True)
class Soak:
    """Samples, requests by kind, and the minutes of wrong answers (`faults`)."""

    samples: list[Sample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[float] = field(default_factory=list)
    minutes: float = 0.0

    def growth(self, end: float) -> dict[str, float]:
        """Percent by which the five minutes before `end` are above the base, by quantity."""
        found = {}
        for name, figure in FIGURES.items():
            base, last = (
                [each.held[name] for each in self.samples if first <= each.minute < first + WINDOW]
                for first in (WARM_UP, end - WINDOW)
            )
            if base and last:
                found[name] = 100 * (figure(last) / figure(base) - 1)
        return found

    @property
    def held_minutes(self) -> int:
        """Whole minutes up to the last one that holds; after a leak none does."""
        held = int(min([self.minutes, *self.faults]))
        minutes = range(WARM_UP + WINDOW, held + 1)
        holding = (each for each in minutes if max(self.growth(each).values(), default=0.0) <= GROWTH_PERCENT)
        return max(holding, default=minutes.start - 1) if minutes else held


def look() -> dict[str, int]:
    """Bytes of this process's private memory, its descriptors and its threads."""
    proc = Path("/proc/self")
    rollup = (proc / "smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    return {
        "memory": private << 10,
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": len(list((proc / "task").iterdir())),
    }


class Load:
    """Seeded requests to an engine, whose answers must be those of the `cold` one."""

    def __init__(self, llm: LLM, cold: LLM, seen: Soak) -> None:
        self._llm, self._cold, self._seen, self._random = llm, cold, seen, random.Random(0)
        self._shared = [stock_list(self._random, ROWS) for _ in range(DOCUMENTS)]
        self._began = time.monotonic()

    @property
    def minute(self) -> float:
        return (time.monotonic() - self._began) / MINUTE_SECONDS

    def turn(self) -> None:
        """One request."""
        (kind,) = self._random.choices(list(KINDS), list(KINDS.values()))
        prompt, tenant = self._prompt(kind), self._random.choice(TENANTS)
        self._seen.counts[kind] += 1
        if kind == "ended":
            next(stream := self._llm.generate_async(prompt, ENDED, cache_salt=tenant))
            stream.close()
            self._llm.settle()
        elif kind == "streamed":
            *_, last = self._llm.generate_async(prompt, ANSWER, cache_salt=tenant)
            self._compare(prompt, last.outputs[0].text)
        else:
            (output,) = self._llm.generate([prompt], ANSWER, cache_salt=tenant)
            self._compare(prompt, output.outputs[0].text)

    def _prompt(self, kind: str) -> str:
        """A prompt of new or of shared documents, which are replaced now and then."""
        if self._random.random() < 0.02:
            self._shared[self._random.randrange(DOCUMENTS)] = stock_list(self._random, ROWS)
        new = [stock_list(self._random, ROWS) for _ in range(3)]
        documents = new if kind == "new" else self._random.sample(self._shared, 3)
        question = self._random.choice(documents[0].questions).text
        return render(f"Answer {self._random.randrange(100)} briefly.", [each.text for each in documents], question)

    def _compare(self, prompt: str, given: str) -> None:
        if self._seen.counts.total() > COMPARED_FIRST and self._random.random() >= COMPARED_SHARE:
            return
        (cold,) = self._cold.generate([prompt], ANSWER)
        self._seen.counts["compared"] += 1
        if cold.outputs[0].text != given:
            self._seen.faults.append(self.minute)
            say(f"minute {self.minute:.2f}: {given!r} in place of {cold.outputs[0].text!r}")


def soak(minutes: int) -> Soak:
    """Sends requests for so many minutes, and samples the process."""
    seen, runner = Soak(), load(None, "cpu", "float32")
    with ExitStack() as ending:
        disk = disk_tier(Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))), DISK_BYTES)
        cold = ending.enter_context(open_cold(shipped_model(), runner, POOL_TOKENS))
        llm = ending.enter_context(open_llm(shipped_model(), runner, SETTINGS | disk, pool_tokens=POOL_TOKENS))
        asking = Load(llm, cold, seen)
        due = SAMPLE_SECONDS / MINUTE_SECONDS
        while asking.minute < minutes:
            turn_ends = time.monotonic() + TURN_SECONDS
            asking.turn()
            time.sleep(max(0.0, turn_ends - time.monotonic()))
            if asking.minute >= due:
                due += SAMPLE_SECONDS / MINUTE_SECONDS
                seen.samples.append(Sample(asking.minute, look()))
        seen.minutes = asking.minute
    return seen


def run(minutes: int, rows: Results) -> None:
    """Measures the row."""
    seen = soak(minutes)
    asked = ", ".join(f"{count:,} {kind}" for kind, count in sorted(seen.counts.items()))
    grown = ", ".join(f"{name} {percent:+.1f} %" for name, percent in seen.growth(seen.minutes).items())
    told = f"requests: {asked}; {len(seen.faults)} wrong; last five minutes over minutes 5 to 10: {grown}"
    rows.add("soak_minutes", seen.held_minutes, "minutes", told, LEAST_MINUTES, "higher")


main = partial(run_counted, "soak", __doc__, [Count("minutes", MINUTES, "how long")], run)


if __name__ == "__main__":
    main()
