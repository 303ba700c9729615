"""Prometheus series of a gateway's placements, in the registry that the gateway's /metrics shows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from semblend_trt.fleet.placement import RESULTS
from semblend_trt.fleet.status import LIVE_PROBLEMS, FleetStatus
from semblend_trt.metrics import count_here_where_unwritable, counter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from semblend_trt.fleet.directory import Directory

logger = logging.getLogger(__name__)

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class PlacementCounters:
    """Counts for one gateway process; without prometheus_client, or not `enabled`, nothing. Raises nothing."""

    def __init__(self, enabled: bool = True, registry: CollectorRegistry | None = None) -> None:
        self._series: dict[str, Any] = {}
        self._registry = registry
        if not enabled:
            return
        try:
            from prometheus_client import REGISTRY, Histogram

            count_here_where_unwritable()
            self._registry = place = registry or REGISTRY
            named, text = "semblend_placements", "Requests by what placed them."
            made: dict[str, Any] = {"results": counter(place, named, text, "result", known=RESULTS)}
            named, text = "semblend_placement_tokens", "Prompt and held tokens."
            made["tokens"] = counter(place, named, text, "kind", known=("prompt", "held"))
            made["salts"] = counter(place, "semblend_placement_client_salts", "Salts of clients, removed.")
            named, text = "semblend_placement_seconds", "Look-up and choice."
            made["seconds"] = Histogram(named, text, (), buckets=_SECONDS, registry=place)
        except ImportError:
            return
        except ValueError as error:  # another gateway of the process counts already
            logger.warning("no placements are counted: %s", error)
            return
        self._series = made

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
