"""Counts of events, in the object and in Prometheus."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Series

from semblend_trt.fleet.publisher import DROP_REASONS, EventCounters


def test_counts_are_shown_in_prometheus() -> None:
    registry = CollectorRegistry()
    first, second = EventCounters(registry=registry), EventCounters(registry=registry)
    first.count_dropped("overflow", 3)
    second.count_dropped("overflow")
    second.count_dropped("closed", 0)
    first.count_sent(Counter(donor_registered=5))
    first.count_resync("connected")
    first.count_connection(succeeded=False)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"semblend_{name}_total", labels)

    assert (first.dropped["overflow"], second.dropped["overflow"], first.failures) == (3, 1, 1)
    assert value("events_dropped", reason="overflow") == 4
    assert {value("events_dropped", reason=reason) for reason in DROP_REASONS} == {4, 0}
    assert value("events", kind="donor_registered") == 5
    assert value("event_resyncs", reason="connected") == 1
    assert value("event_connections", result="failed") == 1


def test_names_that_are_taken_cost_the_series_only() -> None:
    registry = CollectorRegistry()
    Series("semblend_events", "Somebody else's.", registry=registry)
    counters = EventCounters(registry=registry)
    counters.count_sent(Counter(donor_registered=5))
    assert counters.sent["donor_registered"] == 5
