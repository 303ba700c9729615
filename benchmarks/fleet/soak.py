"""Minutes in which a fleet under a gentle load gave no wrong answer and grew neither memory, descriptors nor threads.

`python -m benchmarks.fleet.soak` runs a router and a worker with the shipped model, whose tiers are so small that
they are full within minutes. Two tenants ask with shared and with new documents about once a second; some clients
leave before the answer or within a stream, and some bodies are malformed. Answers are compared with a cold engine's.

Every 10 s, between requests, the private memory, the descriptors and the threads of both processes are sampled. Samples
are noisy, so five minutes make one figure: the median of memory, the minimum of descriptors and threads, since those of
connections and files come and go, while leaked ones stay. Minutes 5 to 10 are the base. A later minute holds when the
five minutes before it are at most 2 % above the base. The row counts the minutes up to the last one that holds, and
before the first wrong or missing answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.fleet.server import loopback_server
from benchmarks.fleet.server_process import MODEL, fleet, key_of, worker
from benchmarks.program import Count, run_counted
from engine_wrapper.embedded.sampling import SamplingParams
from validation.documents import stock_list
from validation.embedded_engine import open_cold
from validation.models import load, shipped_model
from validation.prompts import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.fleet.server_process import ServerProcess
    from validation.results import Results

logger = logging.getLogger(__name__)

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
POOL_TOKENS, ANSWER_TOKENS, PATIENCE = 2048, 8, 60.0
DOCUMENTS, ROWS = 8, 8
# The load reaches all of these bounds before the base is taken.
SETTINGS = {
    "HOST_BYTES": str(32 << 20),
    "DISK_BYTES": str(64 << 20),
    "STAGING_BYTES": str(16 << 20),
    "SNAPSHOT_BYTES": str(32 << 20),
    "MAX_DONORS": "48",
    "HEARTBEAT_SECONDS": "2",
    "RESYNC_SECONDS": "30",
}
# As docs/fleet.md advises: otherwise glibc keeps more and more freed memory.
ALLOCATOR = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
MALFORMED = (
    b"",
    b"{",
    b"[1, 2]",
    b"\xff\xfe",
    b'{"prompt": 7}',
    b'{"prompt": [-1]}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": "hot"}',
    b"[" * 10_000,
)
# Kinds of requests and their weights.
KINDS = {"shared": 9, "new": 4, "streamed": 3, "aborted": 2, "left": 2, "malformed": 2}


@dataclass(frozen=True, slots=True)
class Sample:
    """A process's bytes, descriptors and threads by name, at a minute of the run."""

    minute: float
    held: Mapping[str, int]


@dataclass(slots=True)
class Soak:
    """Samples by process, requests by kind, and the minutes of wrong or missing answers (`faults`)."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[float] = field(default_factory=list)
    minutes: float = 0.0

    def fault(self, minute: float, sentence: str) -> None:
        """Records a wrong or missing answer."""
        self.faults.append(minute)
        logger.warning("minute %.2f: %s", minute, sentence)

    def growth(self, end: float) -> dict[str, float]:
        """Percent by which the five minutes before `end` are above the base, by process and quantity."""
        found = {}
        for process, samples in self.samples.items():
            for name, figure in FIGURES.items():
                base, last = (
                    [each.held[name] for each in samples if first <= each.minute < first + WINDOW]
                    for first in (WARM_UP, end - WINDOW)
                )
                if base and last:
                    found[f"{process} {name}"] = 100 * (figure(last) / figure(base) - 1)
        return found

    @property
    def held_minutes(self) -> int:
        """Whole minutes up to the last one that holds; behind a leak none does."""
        held = int(min([self.minutes, *self.faults]))
        minutes = range(WARM_UP + WINDOW, held + 1)
        holding = (each for each in minutes if max(self.growth(each).values(), default=0.0) <= GROWTH_PERCENT)
        return max(holding, default=minutes.start - 1) if minutes else held


def look(pid: int) -> dict[str, int]:
    """Bytes of the process's private memory, its descriptors and its threads."""
    proc = Path("/proc") / str(pid)
    rollup = (proc / "smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    threads = next(line for line in (proc / "status").read_text().splitlines() if line.startswith("Threads:"))
    return {
        "memory": private << 10,
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": int(threads.split()[1]),
    }


class Load:
    """Seeded requests to `url`, and the answers of a cold engine over the same weights."""

    def __init__(self, url: str, seen: Soak) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._peer, self._seen, self._random = (address.hostname, address.port), seen, random.Random(0)
        self._shared = [stock_list(self._random, ROWS) for _ in range(DOCUMENTS)]
        self._cold = open_cold(shipped_model(), load(None, "cpu", "float32"), POOL_TOKENS)
        self._began = time.monotonic()
        self._threads = ThreadPoolExecutor(2)

    def close(self) -> None:
        self._threads.shutdown()
        self._cold.shutdown()

    @property
    def minute(self) -> float:
        return (time.monotonic() - self._began) / MINUTE_SECONDS

    def turn(self) -> None:
        """One request, or two at once; waits for their answers."""
        kinds = self._random.choices(list(KINDS), list(KINDS.values()), k=self._random.choice((1, 1, 1, 2)))
        asked = [(kind, self._random.choice(TENANTS), self._prompt(kind)) for kind in kinds]
        for (kind, _, prompt), fault in zip(asked, self._threads.map(self._ask, asked), strict=True):
            self._seen.counts[kind] += 1
            if isinstance(fault, bytes):
                self._compare(kind, prompt, fault)
            elif fault:
                self._seen.fault(self.minute, f"{kind}: {fault}")

    def _prompt(self, kind: str) -> str:
        """A prompt of new or of shared documents, which are replaced now and then."""
        if self._random.random() < 0.02:
            self._shared[self._random.randrange(DOCUMENTS)] = stock_list(self._random, ROWS)
        new = [stock_list(self._random, ROWS) for _ in range(3)]
        documents = new if kind == "new" else self._random.sample(self._shared, 3)
        question = self._random.choice(documents[0].questions).text
        return render(f"Answer {self._random.randrange(100)} briefly.", [each.text for each in documents], question)

    def _ask(self, asked: tuple[str, str, str]) -> str | bytes | None:
        """The text of an answer as bytes, a sentence about a fault, or None."""
        kind, tenant, prompt = asked
        streams, leaves = kind in ("streamed", "left"), kind in ("aborted", "left")
        fields: dict[str, Any] = {"prompt": prompt, "temperature": 0, "stream": streams, "max_tokens": ANSWER_TOKENS}
        if leaves:
            fields |= {"max_tokens": 64, "ignore_eos": True}
        number = self._seen.counts[kind]
        body = MALFORMED[number % len(MALFORMED)] if kind == "malformed" else json.dumps(fields).encode()
        connection = http.client.HTTPConnection(*self._peer, timeout=PATIENCE)
        try:
            with contextlib.closing(connection):
                connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key_of(tenant)}"})
                if kind == "aborted":
                    return None
                response = connection.getresponse()
                data = response.read(1) if kind == "left" else response.read()
        except (OSError, http.client.HTTPException) as error:
            return f"no answer: {error!r}"
        if kind == "malformed":
            return None if 400 <= response.status < 500 else f"status {response.status} to {body[:40]!r}"
        if response.status != 200:
            return f"status {response.status}: {data[:200]!r}"
        return None if leaves else _text(data, streams)

    def _compare(self, kind: str, prompt: str, given: bytes) -> None:
        if sum(self._seen.counts.values()) > COMPARED_FIRST and self._random.random() >= COMPARED_SHARE:
            return
        (cold,) = self._cold.generate([prompt], SamplingParams(max_tokens=ANSWER_TOKENS))
        self._seen.counts["compared"] += 1
        if cold.outputs[0].text != given.decode():
            self._seen.fault(self.minute, f"{kind}: {given!r} in place of {cold.outputs[0].text!r}")


def _text(data: bytes, is_stream: bool) -> bytes:
    """The text of an answer, UTF-8."""
    if not is_stream:
        return str(json.loads(data)["choices"][0]["text"]).encode()
    events = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(each)["choices"][0]["text"] for each in events).encode()


@contextlib.contextmanager
def soaked_fleet(folder: Path) -> Iterator[dict[str, ServerProcess]]:
    """A router, a worker with tiers in memory and on disk, and a NATS server between them."""
    disk = folder / "donors"
    disk.mkdir()
    settings = SETTINGS | {"DISK_PATH": str(disk), "DISK_KEY_PATH": str(folder / "key")}
    variables = {f"SEMBLEND_{name}": value for name, value in settings.items()} | ALLOCATOR
    with loopback_server() as nats:
        profile = str(MODEL / "reuse-profile.json")
        arguments = ("--worker-id", "1", "--nats", nats.url, "--profile", profile, "--max-batch-size", "2")
        serving = worker(*arguments, **variables)
        with fleet(folder, [serving], TENANTS, variables=ALLOCATOR, nats_url=nats.url) as front:
            front.address()
            yield {"router": front, "worker": serving}


def soak(processes: Mapping[str, ServerProcess], minutes: int) -> Soak:
    """Sends requests for so many minutes, and samples the processes."""
    seen = Soak(samples={name: [] for name in processes})
    with contextlib.closing(Load(processes["router"].address(), seen)) as asking:
        due = SAMPLE_SECONDS / MINUTE_SECONDS
        while asking.minute < minutes:
            turn_ends = time.monotonic() + TURN_SECONDS
            asking.turn()
            time.sleep(max(0.0, turn_ends - time.monotonic()))
            if asking.minute < due:
                continue
            due += SAMPLE_SECONDS / MINUTE_SECONDS
            for name, process in processes.items():
                seen.samples[name].append(sample := Sample(asking.minute, look(process.pid)))
                logger.info("minute %.2f: %s has %s", sample.minute, name, sample.held)
        seen.minutes = asking.minute
    return seen


def run(minutes: int, rows: Results) -> None:
    """Measures the row."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, soaked_fleet(Path(folder)) as processes:
        seen = soak(processes, minutes)
    asked = ", ".join(f"{count:,} {kind}" for kind, count in sorted(seen.counts.items()))
    grown = ", ".join(f"{name} {percent:+.1f} %" for name, percent in seen.growth(seen.minutes).items())
    told = f"requests: {asked}; {len(seen.faults)} wrong or missing; last five minutes over minutes 5 to 10: {grown}"
    rows.add("soak_minutes", seen.held_minutes, "minutes", told, LEAST_MINUTES, "higher")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_counted("soak", __doc__, [Count("minutes", MINUTES, "how long")], run, arguments)


if __name__ == "__main__":
    main()
