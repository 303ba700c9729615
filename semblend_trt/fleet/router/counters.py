"""The router's Prometheus series. Labels come from fixed lists or are replicas of the configuration."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from semblend_trt.drift import CHECK_RESULTS
from semblend_trt.fleet.directory import worker_name
from semblend_trt.fleet.router.serving import DROPPED
from semblend_trt.metrics import COLD_RUN_RESULTS, count_here_where_unwritable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from semblend_trt.fleet.directory import Directory
    from semblend_trt.fleet.router.replicas import ReplicaSet

# Why no replica answered a request.
REFUSALS = (
    *("body_too_large", "bad_json", "bad_encoding", "body_timeout", "body_cut", "prompt_too_long", "tenant_busy"),
    *("unknown_key", "tenant_forbidden", "tenant_missing", "bad_session", "bad_verify", "verify_forbidden"),
    *("http_error", "no_replica", "internal_error"),
)
# Why a request was placed by load alone.
FALLBACKS = ("unread_prompt", "slow_reading", "directory_failed")
FAILED_ATTEMPTS = ("unreachable", "unwilling", "slow")
TRACE_RESULTS = ("written", "dropped", "failed")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterCounters:
    """The series of one router, in a registry of their own."""

    def __init__(self) -> None:
        count_here_where_unwritable()
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered by a replica.", "worker", "status")
        self.refusals = self._counter("refusals", "Requests that no replica answered.", reason=REFUSALS)
        held = "Prompt tokens, and those that the chosen replica was expected to hold."
        self.tokens = self._counter("tokens", held, kind=("prompt", "held"))
        self.fallbacks = self._counter("fallbacks", "Requests placed by load alone.", reason=FALLBACKS)
        failed = "Attempts that a replica did not answer; the request then goes to another one."
        self.failed_attempts = self._counter("failed_attempts", failed, reason=FAILED_ATTEMPTS)
        self.broken_streams = self._counter("broken_streams", "Streams that a replica broke off.")
        self.client_salts = self._counter("client_salts", "Cache salts of clients, which are removed.")
        dropped = "Connections that were closed because there were too many."
        self.dropped_connections = self._counter("dropped_connections", dropped, reason=DROPPED)
        self.trace_lines = self._counter("trace_lines", "Lines of telemetry, by result.", result=TRACE_RESULTS)
        compared = "Answers compared with a cold run's, by result."
        self.cold_runs = self._counter("cold_runs", compared, result=COLD_RUN_RESULTS)
        self.bound_checks = self._counter("bound_checks", "Answers under a bound, by result.", result=CHECK_RESULTS)
        placed = "Time from a request's body to the choice of its replica."
        self.placement_seconds = self._histogram("placement_seconds", placed)
        first = "Time from a streamed request to the first byte of its answer."
        self.first_byte_seconds = self._histogram("first_byte_seconds", first)

    def _counter(self, name: str, text: str, *labels: str, **values: tuple[str, ...]) -> Counter:
        """Make a counter. With known `values` its series exist from the start: a 0 differs from a missing series."""
        series = Counter(f"semblend_router_{name}", text, [*labels, *values], registry=self.registry)
        for value in itertools.chain(*values.values()):
            series.labels(value)
        return series

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"semblend_router_{name}", text, buckets=_SECONDS, registry=self.registry)

    def refused(self, reason: str) -> None:
        self.refusals.labels(reason).inc()

    def dropped(self, reason: str) -> None:
        self.dropped_connections.labels(reason).inc()


class FleetGauges:
    """A Prometheus collector that reads replicas and directory when it is scraped."""

    def __init__(self, replicas: ReplicaSet, directory: Directory | None) -> None:
        self._replicas, self._directory = replicas, directory

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily("semblend_router_replica_healthy", "1 for a healthy replica.", labels=["worker"])
        in_flight = GaugeMetricFamily("semblend_router_replica_in_flight", "Requests under way.", labels=["worker"])
        load = GaugeMetricFamily("semblend_router_replica_load", "Tokens to compute.", labels=["worker"])
        for state in list(self._replicas.states.values()):
            name = [worker_name(state.worker)]
            healthy.add_metric(name, state.is_healthy)
            in_flight.add_metric(name, state.in_flight)
            load.add_metric(name, state.load)
        yield from (healthy, in_flight, load)
        if self._directory is not None:
            donors = GaugeMetricFamily("semblend_router_donors", "Known donors.", labels=["worker"])
            for worker, followed in self._directory.workers().items():
                donors.add_metric([worker_name(worker)], len(followed.donors))
            yield donors

    def describe(self) -> Iterator[Metric]:
        return iter(())
