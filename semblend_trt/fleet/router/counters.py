"""What the router counts, for its own /metrics. Labels are of fixed lists, or replicas of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from semblend_trt.fleet.router.serving import DROPPED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from semblend_trt.fleet.directory import Directory, Worker
    from semblend_trt.fleet.router.replicas import ReplicaSet

# Why a request was placed by load alone.
FALLBACKS = ("unread_prompt", "slow_reading", "directory_failed")
FAILED_ATTEMPTS = ("unreachable", "unwilling", "slow")
TRACE_RESULTS = ("written", "dropped", "failed")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterCounters:
    """The series of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "semblend_router_requests", "Requests answered by a replica.", ["worker", "status"], registry=registry
        )
        self.refusals = Counter(
            "semblend_router_refusals", "Requests that no replica answered.", ["reason"], registry=registry
        )
        self.tokens = Counter(
            "semblend_router_tokens",
            "Prompt tokens, and those that the chosen replica was expected to hold.",
            ["kind"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "semblend_router_fallbacks", "Requests placed by load alone.", ["reason"], registry=registry
        )
        self.failed_attempts = Counter(
            "semblend_router_failed_attempts",
            "Times a replica did not answer, and another was asked where there was one.",
            ["reason"],
            registry=registry,
        )
        self.broken_streams = Counter(
            "semblend_router_broken_streams", "Streams that a replica did not end.", registry=registry
        )
        self.client_salts = Counter(
            "semblend_router_client_salts", "Cache salts of clients, which were left out.", registry=registry
        )
        self.dropped_connections = Counter(
            "semblend_router_dropped_connections",
            "Connections that were ended since there were too many.",
            ["reason"],
            registry=registry,
        )
        self.trace_lines = Counter(
            "semblend_router_trace_lines", "Lines of telemetry, by what became of them.", ["result"], registry=registry
        )
        self.placement_seconds = Histogram(
            "semblend_router_placement_seconds",
            "Time from a request's body to the choice of its replica.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "semblend_router_first_byte_seconds",
            "Time from a streamed request to the first byte of its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        for series, labels in (
            (self.fallbacks, FALLBACKS),
            (self.failed_attempts, FAILED_ATTEMPTS),
            (self.dropped_connections, DROPPED),
            (self.trace_lines, TRACE_RESULTS),
            (self.tokens, ("prompt", "held")),
        ):
            for label in labels:  # series that exist from the start can be told from a router that counts nothing
                series.labels(label)

    def refused(self, reason: str) -> None:
        self.refusals.labels(reason).inc()

    def dropped(self, reason: str) -> None:
        self.dropped_connections.labels(reason).inc()


class FleetGauges:
    """A Prometheus collector that looks at replicas and directory when it is scraped."""

    def __init__(self, replicas: ReplicaSet, directory: Directory | None) -> None:
        self._replicas, self._directory = replicas, directory

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily("semblend_router_replica_healthy", "1 for one that answers.", labels=["worker"])
        in_flight = GaugeMetricFamily("semblend_router_replica_in_flight", "Requests under way.", labels=["worker"])
        load = GaugeMetricFamily("semblend_router_replica_load", "Tokens to compute.", labels=["worker"])
        for state in list(self._replicas.states.values()):
            name = [worker_name(state.worker)]
            healthy.add_metric(name, state.is_healthy)
            in_flight.add_metric(name, state.in_flight)
            load.add_metric(name, state.load)
        yield from (healthy, in_flight, load)
        if self._directory is not None:
            donors = GaugeMetricFamily("semblend_router_donors", "Donors that are known.", labels=["worker"])
            for known in self._directory.workers():
                donors.add_metric([worker_name(known.worker)], known.donors)
            yield donors

    def describe(self) -> Iterator[Metric]:
        return iter(())


def worker_name(worker: Worker) -> str:
    """A worker in text, as `semblend-trt events` writes it: its id and its rank."""
    return f"{worker[0]}.{worker[1]}"
