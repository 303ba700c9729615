"""How many donor events a publisher sends to a server on this machine, and how much memory it takes without one.

In every step one donor comes and the oldest goes, so half of the events carry a sketch. The rate counts events that the
server has taken, by its own count. For the second figure the server is away for ten minutes of a simulated clock.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.fleet.server import (
    NAMESPACE,
    free_port,
    loopback_server,
    publisher_to,
    resident_mib,
    texts,
)
from benchmarks.program import Count, run_counted
from semblend_trt.config import EventFormat
from semblend_trt.fleet.announcer import DonorAnnouncer

if TYPE_CHECKING:
    from semblend_trt.fleet.publisher import EventPublisher
    from validation.results import Results

HELD = 16384
MAX_WAITING = 4096
DOWN_SECONDS, DOWN_HELD, DOWN_PER_S = 600, 2000, 200
# Nothing asks for heartbeats or resyncs.
QUIET: dict[str, Any] = {"heartbeat_seconds": 3600.0, "resync_seconds": 0.0}


class Donors:
    """Donors that come and go through one announcer; at most `held` at a time."""

    def __init__(self, publisher: EventPublisher, held: int, tokens: int) -> None:
        self._announcer = DonorAnnouncer(publisher, publisher.close)
        self._texts = texts(256, tokens)
        self._held, self.count = held, 0

    def step(self) -> None:
        """One donor comes, and the oldest goes where there are too many."""
        name = f"0123456789ab-{self.count}"
        self._announcer.intended(name, NAMESPACE, None)
        self._announcer.held(name, self._texts[self.count % len(self._texts)], "host")
        if self.count >= self._held:
            self._announcer.gone(f"0123456789ab-{self.count - self._held}")
        self.count += 1

    def close(self) -> None:
        self._announcer.close()


def rate(form: EventFormat, seconds: float, tokens: int) -> tuple[float, float, float]:
    """Events a second that the server took, microseconds of CPU here for each, and the seconds measured."""
    with loopback_server() as server:
        publisher = publisher_to(server.url, form=form, **QUIET)
        donors = Donors(publisher, HELD, tokens)
        for _ in range(HELD):
            donors.step()
        _await_sent(publisher)
        taken, before = server.messages_taken(), sum(publisher.counters.dropped.values())
        began, worked = time.perf_counter(), time.process_time()
        steps = 0
        while time.perf_counter() - began < seconds:
            for _ in range(256):
                donors.step()
            steps += 256
            while len(publisher._changes) > MAX_WAITING:
                time.sleep(0.001)
        _await_sent(publisher)
        elapsed, worked = time.perf_counter() - began, time.process_time() - worked
        sent = server.messages_taken() - taken
        dropped = sum(publisher.counters.dropped.values()) - before
        donors.close()
    if sent < 2 * steps or dropped:
        sys.exit(f"The server took {sent} of {2 * steps} events, and {dropped} were dropped.")
    return sent / elapsed, worked / sent * 1e6, elapsed


def growth_without_server() -> float:
    """MiB by which the process grows in the last nine of ten simulated minutes without a server."""
    simulated = [0.0]
    publisher = publisher_to(
        f"nats://127.0.0.1:{free_port()}", clock=lambda: simulated[0], heartbeat_seconds=10.0, resync_seconds=300.0
    )
    donors = Donors(publisher, DOWN_HELD, 2048)
    after_a_minute = 0.0
    for second in range(DOWN_SECONDS):
        for _ in range(DOWN_PER_S):
            donors.step()
        while len(publisher._changes) > MAX_WAITING:
            time.sleep(0.001)
        simulated[0] += 1.0
        if second == DOWN_SECONDS // 10:
            after_a_minute = resident_mib()
    grown = resident_mib() - after_a_minute
    if publisher.counters.connections["made"]:
        sys.exit("A server listens on the port that should be free.")
    donors.close()
    return grown


def run(seconds: int, tokens: int, results: Results) -> None:
    """Adds the rows of both measurements."""
    grown = growth_without_server()
    for form in EventFormat:
        found, work, elapsed = rate(form, seconds, tokens)
        end = "" if form is EventFormat.JSON else f"_{form.value}"
        baseline = f"{elapsed:.0f} s on loopback, half of them donors of {tokens} tokens with their sketches"
        results.add(f"publisher_cpu_us_per_event{end}", work, "us", baseline=baseline)
        results.add(f"publisher_events_per_s{end}", found, "events/s", goal=20_000, better="higher", baseline=baseline)
    baseline = (
        f"{2 * DOWN_SECONDS * DOWN_PER_S} events in {DOWN_SECONDS} simulated seconds without a server, "
        f"{DOWN_HELD} donors held; after the first minute"
    )
    results.add("publisher_down_10min_growth_mib", grown, "MiB", goal=16, baseline=baseline)


def _await_sent(publisher: EventPublisher) -> None:
    if not publisher.flush(120):
        sys.exit("The publisher did not reach the server.")


_COUNTS = [Count("seconds", 10, "how long to publish"), Count("tokens", 1024, "tokens of each donor")]
main = partial(run_counted, "fleet_publisher", __doc__, _COUNTS, run)

if __name__ == "__main__":
    main()
