"""The engine's calls that could not be answered, as a Prometheus series that every engine of the process adds to."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric


class FaultCounts:
    """A Prometheus collector that adds up what engines count in their runtimes, and what ended ones have counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Counter[str]] = []
        self._ended: Counter[str] = Counter()

    def add(self, faults: Counter[str]) -> None:
        with self._lock:
            self._running.append(faults)

    def settle(self, faults: Counter[str]) -> None:
        """Keeps what `faults` holds now, so that the sum never falls, and lets it go."""
        with self._lock:
            # By identity: engines with equal counts are two.
            self._running = [each for each in self._running if each is not faults]
            self._ended.update(dict(faults))

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            total = self._ended.copy()
            for faults in self._running:
                total.update(dict(faults))  # a copy, which the engine's threads cannot change meanwhile
        yield _faults(total)

    def describe(self) -> Iterator[Metric]:
        yield _faults({})


def _faults(counts: Mapping[str, int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "semblend_faults", "Calls of the engine that could not be answered, by name.", labels=["fault"]
    )
    for name, count in sorted(counts.items()):
        family.add_metric([name], count)
    return family
