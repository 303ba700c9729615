"""What the metrics count, that engines share them, and that serving never fails by them."""

import json
import os
import subprocess
import sys
from collections import Counter as Counts
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from semblend_trt.donors.catalog import CatalogStats
from semblend_trt.metrics import metrics_for
from semblend_trt.outcome import TOKEN_KINDS, Outcome, ReuseReport
from semblend_trt.reasons import FAULTS, OTHER_REASON

USED, DECLINED = Outcome.BACKEND_MATERIALIZED_REUSE.value, Outcome.BACKEND_DECLINED_REUSE.value
TOLD = {"checked_tokens": 800, "recomputed_tokens": 100, "largest_kept": 0.04, "sampled_tokens": 90}
CHECKED = ReuseReport(USED, None, reused_tokens=700, computed_holes=140, offered_tokens=800, **TOLD)
UNKNOWN = ReuseReport(USED, None, reused_tokens=64, computed_holes=736, offered_tokens=800, **dict.fromkeys(TOLD))

# Counts once, prints what is counted and how often was warned; `spoil` makes the folder what it is to be.
COUNTS = """
import json, logging, os, resource, shutil, sys
from prometheus_client import generate_latest
from pathlib import Path

folder, fault = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]), sys.argv[1]
warnings = []
logging.getLogger("semblend_trt").addHandler(type("H", (logging.Handler,), {"emit": lambda _, r: warnings.append(r)})())
if fault == "torn":
    for kind in ("counter", "histogram"):
        (folder / f"{kind}_{os.getpid()}.db").write_bytes(b"torn" * 20)
if fault == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

from semblend_trt.fleet.publisher import EventCounters
from semblend_trt.fleet.placement import PlacementCounters
from semblend_trt.metrics import metrics_for
from semblend_trt.outcome import Outcome, ReuseReport

metrics, events, placements = metrics_for(), EventCounters(), PlacementCounters()
if fault == "gone":
    shutil.rmtree(folder)
for reason in ("low_reuse", "deviation"):
    metrics_for().request_ended(ReuseReport(Outcome.BACKEND_DECLINED_REUSE.value, reason, reused_tokens=4))
    events.count("sent", "donor_registered")
    placements.placed("held", 0.1)
page = generate_latest().decode()
counted = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line.startswith("semblend")}
print(json.dumps([counted, len(warnings)]))
"""


def index_of(donors, host_bytes, device_bytes):
    """An engine's index with these donors."""
    return Mock(held=lambda: CatalogStats(ready=donors, host_bytes=host_bytes, device_bytes=device_bytes))


@pytest.fixture
def registry():
    return CollectorRegistry()


def value(registry, name, **labels):
    found = registry.get_sample_value(f"semblend_{name}", labels)
    assert found is not None, f"{name} {labels} is not there"
    return found


def tokens(registry):
    return {kind: value(registry, "tokens_total", kind=kind) for kind in TOKEN_KINDS}


def test_every_outcome_kind_and_fault_is_there_from_the_start(registry):
    metrics_for(registry)
    assert {value(registry, "requests_total", outcome=outcome.value) for outcome in Outcome} == {0.0}
    assert set(tokens(registry).values()) == {0.0}
    assert {value(registry, "faults_total", fault=fault) for fault in FAULTS} == {0.0}
    assert value(registry, "donors") == 0
    assert value(registry, "donor_bytes", tier="host") == value(registry, "donor_bytes", tier="device") == 0


@pytest.mark.parametrize(
    ("report", "counts", "deviations"),
    [
        (replace(CHECKED, exact_prefix_tokens=64), (800, 90, 800, 700, 100, 64), 1),
        # A check that no rank reports.
        (UNKNOWN, (800, 0, 0, 64, 0, 0), 0),
    ],
)
def test_tokens_of_a_request(registry, report, counts, deviations):
    metrics_for(registry).request_ended(report)
    assert value(registry, "requests_total", outcome=USED) == 1
    assert tokens(registry) == dict(zip(TOKEN_KINDS, counts, strict=True))
    assert value(registry, "kept_deviation_count") == deviations
    assert value(registry, "kept_deviation_sum") == 0.04 * deviations


def test_refusals_and_lookups(registry):
    metrics = metrics_for(registry)
    for reason in ("low_reuse", "low_reuse", "deviation", "a", "b", "\ud800"):
        metrics.request_ended(ReuseReport(DECLINED, reason))
    metrics.looked_up(0.002)
    assert value(registry, "requests_total", outcome=DECLINED) == 6
    counted = {reason: value(registry, "refusals_total", reason=reason) for reason in ("low_reuse", "deviation")}
    assert counted == {"low_reuse": 2, "deviation": 1}
    assert value(registry, "refusals_total", reason=OTHER_REASON) == 3
    buckets = [value(registry, "lookup_seconds_bucket", le=bound) for bound in ("0.001", "0.0025", "+Inf")]
    assert buckets == [0, 1, 1]


def test_engines_of_one_process_share_the_series_and_add_up(registry):
    engines = [metrics_for(registry) for _ in range(3)]
    indexes = [index_of(2, 100, 10), index_of(3, 1000, 0)]
    for metrics in engines:
        metrics.request_ended(CHECKED)
    for metrics, index in zip(engines, indexes, strict=False):
        metrics.watch(index)
    assert value(registry, "requests_total", outcome=USED) == 3
    assert value(registry, "donors") == 5
    assert value(registry, "donor_bytes", tier="host") == 1100
    assert value(registry, "donor_bytes", tier="device") == 10
    engines[0].close()
    engines[0].close()
    assert value(registry, "donors") == 3
    assert value(registry, "requests_total", outcome=USED) == 3


def test_faults_add_up_and_never_fall(registry):
    engines, counted = [metrics_for(registry) for _ in range(2)], [Counts({"metadata": 2}) for _ in range(2)]
    for metrics, faults in zip(engines, counted, strict=True):
        metrics.watch_faults(faults)
    counted[1]["request_data"] += 1
    assert [value(registry, "faults_total", fault=name) for name in ("metadata", "request_data")] == [4, 1]
    engines[1].close()
    del counted[1]
    counted[0]["metadata"] += 1
    assert [value(registry, "faults_total", fault=name) for name in ("metadata", "request_data")] == [5, 1]


def test_without_prometheus_client_nothing_is_counted(registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    use_all(metrics_for(registry))
    monkeypatch.undo()
    assert list(registry.collect()) == []


def test_taken_names_cost_the_metrics_and_no_more(registry, caplog):
    Counter("semblend_requests", "Another package's.", registry=registry)
    use_all(metrics_for(registry))
    assert "requests and donors are not counted" in caplog.text


@pytest.mark.parametrize("report", [None, ReuseReport(USED, None, reused_tokens=-1, offered_tokens=-5)])
def test_a_wrong_report_raises_nothing_and_is_told_once(registry, report, caplog):
    metrics = metrics_for(registry)
    metrics.request_ended(report)
    metrics.request_ended(report)
    metrics.looked_up("soon")
    assert len(caplog.records) == 1


@pytest.mark.promise("commands", "A bad `PROMETHEUS_MULTIPROC_DIR` ends no process and no start")
@pytest.mark.parametrize("fault", ["sound", "missing", "torn", "full", "gone"])
def test_the_process_starts_and_counts(tmp_path, fault):
    """A bad PROMETHEUS_MULTIPROC_DIR ends no process and no start."""
    folder = tmp_path / "folder"
    folder.mkdir()
    place = tmp_path / "missing" if fault == "missing" else folder
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(place)}
    found = subprocess.run(
        [sys.executable, "-c", COUNTS, fault], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    counted, warnings = json.loads(found.stdout.splitlines()[-1])
    assert counted['semblend_requests_total{outcome="backend_declined_reuse"}'] == 2
    assert counted['semblend_refusals_total{reason="deviation"}'] == 1
    assert counted['semblend_tokens_total{kind="reused"}'] == 8
    assert counted['semblend_placements_total{result="held"}'] == 2
    assert warnings == (fault not in ("sound", "gone"))
    # Other processes read every file there is.
    assert all(path.stat().st_size for path in folder.glob("*.db"))


def use_all(metrics):
    metrics.looked_up(0.1)
    metrics.request_ended(replace(CHECKED, exact_prefix_tokens=3))
    metrics.watch(index_of(1, 1, 1))
    metrics.close()


def test_racing_engines_lose_no_count(registry):
    def serve(_):
        metrics = metrics_for(registry)
        metrics.request_ended(replace(CHECKED, exact_prefix_tokens=1))
        metrics.watch(index_of(1, 1, 1))
        generate_latest(registry)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(serve, range(200)))
    assert value(registry, "requests_total", outcome=USED) == 200
    assert tokens(registry)["exact_prefix"] == 200
