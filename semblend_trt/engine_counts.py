"""What engines count by name, as a Prometheus counter that every engine of the process adds to."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric


class EngineCounts:
    """A Prometheus collector that adds up what engines have counted, and what ended ones had; `label` says what the
    names of their counts are."""

    def __init__(self, name: str, documentation: str, label: str) -> None:
        self._name, self._documentation, self._label = name, documentation, label
        self._lock = threading.Lock()
        self._running: list[Counter[str]] = []
        self._ended: Counter[str] = Counter()

    def add(self, counts: Counter[str]) -> None:
        with self._lock:
            self._running.append(counts)

    def settle(self, counts: Counter[str]) -> None:
        """Keeps what `counts` holds now, so that the sum never falls, and lets it go."""
        with self._lock:
            # By identity: engines with equal counts are two.
            self._running = [each for each in self._running if each is not counts]
            self._ended.update(dict(counts))

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            total = self._ended.copy()
            for counts in self._running:
                total.update(dict(counts))  # a copy, which the engine's threads cannot change meanwhile
        yield self._family(total)

    def describe(self) -> Iterator[Metric]:
        yield self._family({})

    def _family(self, counts: Mapping[str, int]) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self._name, self._documentation, labels=[self._label])
        for name, count in sorted(counts.items()):
            family.add_metric([name], count)
        return family
