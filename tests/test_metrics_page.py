"""docs/metrics.md names every series, with its labels and whether it is a gauge or a histogram, and no other."""

from functools import cache

import pytest
from prometheus_client import CollectorRegistry

from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.dynamo.relay import PROBLEMS, RESULTS, counter
from semblend_trt.fleet.placement import PlacementCounters
from semblend_trt.fleet.publisher import EventCounters
from semblend_trt.metrics import Series
from tests.pages import Page, code_in


def series(prefix="semblend_"):
    """Kind and labels of every series of the page, by name; `vllm:` has those in vLLM's spelling."""
    found = {}
    for cell, counts in Page("docs/metrics.md").rows:
        for code in code_in(cell):
            name, _, labels = code.partition("{")
            if not name.startswith(prefix):
                continue
            kind = counts.split(":")[0]
            kind = kind if kind in ("gauge", "histogram") else "counter"
            found[name] = kind, set(labels.strip("}").split(",")) - {""}
    return found


@cache
def exported():
    """All metrics of the code."""
    registry, directory = CollectorRegistry(), Directory()
    Series(registry)
    EventCounters(registry=registry)
    PlacementCounters(registry=registry).watch(directory)
    counter(registry, "requests", "result", RESULTS)
    counter(registry, "problems", "problem", PROBLEMS)
    return list(registry.collect())


@pytest.mark.promise("commands", "`docs/metrics.md` lists every series with its labels")
def test_the_page_has_every_series_with_its_labels_and_no_other():
    code = {metric.name + "_total" * (metric.type == "counter"): metric.type for metric in exported()}
    assert {name: kind for name, (kind, _) in series().items()} == code
    code = {sample.name: set(sample.labels) for metric in exported() for sample in metric.samples}
    page = {name: labels for name, (_, labels) in series().items() if name in code}
    assert page == {name: code[name] for name in page}
