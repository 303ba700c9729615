"""Prometheus series of a gateway's placements, in the registry that the gateway's /metrics shows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.placement import RESULTS, Placement
from semblend_trt.fleet.status import LIVE_PROBLEMS, FleetStatus
from semblend_trt.metrics import LOOKUP_BUCKETS, counter, series_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from semblend_trt.config import Settings
    from semblend_trt.fleet.directory import Directory

logger = logging.getLogger(__name__)


class PlacementCounters:
    """Counts for one gateway process; without prometheus_client, or not `enabled`, nothing. Raises nothing."""

    def __init__(self, enabled: bool = True, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry
        self._series = series_of(self._made, registry, "placements") if enabled else {}

    def _made(self, registry: CollectorRegistry) -> dict[str, Any]:
        from prometheus_client import Histogram

        self._registry, name = registry, "semblend_placement"
        return {
            "results": counter(registry, f"{name}s", "Requests by what placed them.", "result", known=RESULTS),
            "tokens": counter(registry, f"{name}_tokens", "Prompt and held tokens.", "kind", known=("prompt", "held")),
            "salts": counter(registry, f"{name}_client_salts", "Salts of clients, removed."),
            "seconds": Histogram(f"{name}_seconds", "Look-up and choice.", buckets=LOOKUP_BUCKETS, registry=registry),
        }

    def placed(self, result: str, seconds: float) -> None:
        """Count one placement by its result, one of RESULTS."""
        if self._series:
            self._series["results"].labels(result).inc()
            self._series["seconds"].observe(seconds)

    def sent(self, tokens: int, held: int) -> None:
        """Count the tokens of a request's prompt, and those that its worker is expected to hold."""
        if self._series:
            self._series["tokens"].labels("prompt").inc(tokens)
            self._series["tokens"].labels("held").inc(held)

    def client_salt(self) -> None:
        if self._series:
            self._series["salts"].inc()

    def watch(self, directory: Directory) -> None:
        """Show the directory's donors and problems at each scrape."""
        if self._series and self._registry is not None:
            self._registry.register(_DirectoryGauges(directory))


class _DirectoryGauges:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        status = FleetStatus.of(self._directory)
        donors = GaugeMetricFamily("semblend_fleet_donors", "Known donors.", labels=["worker"])
        for worker in status.workers:
            donors.add_metric([worker.name], worker.donors)
        problems = GaugeMetricFamily("semblend_fleet_problems", "What is wrong in the fleet.", labels=["problem"])
        for problem in LIVE_PROBLEMS:
            problems.add_metric([problem], len(status.problems.get(problem, ())))
        yield from (donors, problems)

    def describe(self) -> Iterator[Metric]:
        return iter(())


def counted_placement(
    settings: Settings, registry: CollectorRegistry | None = None, tokenizer: str | None = None
) -> tuple[Placement, PlacementCounters]:
    """Return a gateway's placement as the settings have it, and the counters of what it does."""
    options, counters = ConnectionOptions.of(settings), PlacementCounters(settings.metrics, registry)
    if options is None:
        logger.warning("SEMBLEND_NATS_URL is not set: no donor events are read, and load alone places")
    placement = Placement(options, load_weight=settings.load_weight, tokenizer=tokenizer, observe=counters.placed)
    counters.watch(placement.directory)
    return placement, counters
