"""docs/metrics.md names every series, with its labels and whether it is a gauge or a histogram, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.publisher import EventCounters
from semblend_trt.fleet.router.counters import FleetGauges, RouterCounters
from semblend_trt.fleet.router.replicas import ReplicaSet
from semblend_trt.metrics import Series

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(semblend_\w+)(?:\{([\w,]+)\})?` \| (gauge: |histogram: |)", re.MULTILINE)


def described(metric: Metric) -> tuple[str, str]:
    """Name and kind as the page has them."""
    kind = {"counter": ""}.get(metric.type, metric.type + ": ")
    return metric.name + ("_total" if metric.type == "counter" else ""), kind


def test_the_page_has_every_series_and_no_other() -> None:
    registry = CollectorRegistry()
    Series(registry)
    EventCounters(registry=registry)
    router = RouterCounters().registry
    router.register(FleetGauges(ReplicaSet([], None, health_seconds=1, answer_seconds=1), Directory()))  # type: ignore[arg-type]
    code = {described(metric) for source in (registry, router) for metric in source.collect()}
    assert {(name, kind) for name, _, kind in ROW.findall(PAGE)} == code


def test_labels_are_those_of_the_code() -> None:
    registry = CollectorRegistry()
    Series(registry)
    EventCounters(registry=registry)
    told = {name: set(labels.split(",")) - {""} for name, labels, _ in ROW.findall(PAGE)}
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name in told:
                assert (sample.name, set(sample.labels)) == (sample.name, told[sample.name])
