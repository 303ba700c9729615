"""What became of donor events: counts for ever, in Prometheus too where it is there. Raises nothing."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

DROP_REASONS = ("overflow", "disconnected", "oversize", "internal_error", "closed")
RESYNC_REASONS = ("connected", "overflow", "requested", "interval")
SENT_KINDS = (
    "provider_generation_reset",
    "donor_registered",
    "donor_evicted",
    "donor_relocated",
    "donors_purged",
    "provider_heartbeat",
)


class EventCounters:
    """Counts of one publisher, of fixed names only. Thread safe.

    `sent` by kind: handed to a server that answered since. `dropped` by reason: changes that did not go out as events
    of their own; a resync tells readers their result. `resyncs` by reason; `connections` made; `failures` of attempts.
    """

    def __init__(self, enabled: bool = True, registry: CollectorRegistry | None = None) -> None:
        self._lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.resyncs: Counter[str] = Counter()
        self.connections = 0
        self.failures = 0
        self._series = _series_in(registry) if enabled else None

    def count_sent(self, kinds: Counter[str]) -> None:
        with self._lock:
            self.sent.update(kinds)
        for kind, count in kinds.items():
            self._add("sent", kind, count)

    def count_dropped(self, reason: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self.dropped[reason] += count
            self._add("dropped", reason, count)

    def count_resync(self, reason: str) -> None:
        with self._lock:
            self.resyncs[reason] += 1
        self._add("resyncs", reason, 1)

    def count_connection(self, succeeded: bool) -> None:
        with self._lock:
            if succeeded:
                self.connections += 1
            else:
                self.failures += 1
        self._add("connections", "made" if succeeded else "failed", 1)

    def _add(self, name: str, label: str, count: int) -> None:
        if self._series is not None:
            self._series[name].labels(label).inc(count)


_lock = threading.Lock()
_registered: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _series_in(registry: CollectorRegistry | None) -> dict[str, Any] | None:
    try:
        from prometheus_client import REGISTRY

        registry = REGISTRY if registry is None else registry
        with _lock:
            if registry not in _registered:
                _registered[registry] = _registered_in(registry)
            return _registered[registry]
    except ImportError:
        return None
    except Exception as error:
        logger.warning("no metrics of events are kept: %s", error)
        return None


def _registered_in(registry: CollectorRegistry) -> dict[str, Any]:
    from prometheus_client import Counter as Series

    labels = {
        "sent": ("semblend_events", "Donor events sent.", "kind", SENT_KINDS),
        "dropped": ("semblend_events_dropped", "Changes that became no event of their own.", "reason", DROP_REASONS),
        "resyncs": ("semblend_event_resyncs", "Times all donors were told anew.", "reason", RESYNC_REASONS),
        "connections": ("semblend_event_connections", "Connections to NATS.", "result", ("made", "failed")),
    }
    series = {}
    for name, (metric, text, label, values) in labels.items():
        series[name] = Series(metric, text, [label], registry=registry)
        for value in values:  # series that exist from the start can be told from a publisher that counts nothing
            series[name].labels(value)
    return series
