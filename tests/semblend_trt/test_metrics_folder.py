"""A bad PROMETHEUS_MULTIPROC_DIR ends no process and no start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Counts once, prints what is counted and how often was warned; `spoil` makes the folder what it is to be.
COUNTS = """
import json, logging, os, resource, shutil, sys
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
from semblend_trt.fleet.router.counters import RouterCounters
from semblend_trt.fleet.router.serving import metrics_page
from semblend_trt.metrics import metrics_for
from semblend_trt.outcome import Outcome, ReuseReport

metrics, events, router = metrics_for(True), EventCounters(), RouterCounters()
if fault == "gone":
    shutil.rmtree(folder)
for reason in ("low_reuse", "deviation"):
    metrics_for(True).request_ended(ReuseReport(Outcome.BACKEND_DECLINED_REUSE.value, reason, reused_tokens=4))
    events.count("sent", "donor_registered")
    router.refused("no_replica")
if fault == "gone" and os.fork() == 0:
    # With a number of its own, the child would need files of its own.
    metrics.request_ended(ReuseReport(Outcome.COLD_FALLBACK.value, "low_reuse"))
    events.count("sent", "donor_registered")
    os._exit(0)
if fault == "gone":
    assert os.wait()[1] == 0
page = metrics_page().body.decode() + metrics_page(router.registry).body.decode()
counted = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line.startswith("semblend")}
print(json.dumps([counted, len(warnings)]))
"""


def counts(folder, fault):
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    found = subprocess.run(
        [sys.executable, "-c", COUNTS, fault], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    counted, warnings = json.loads(found.stdout.splitlines()[-1])
    return counted, warnings


@pytest.mark.parametrize("fault", ["sound", "missing", "file", "unwritable", "torn", "full", "gone"])
def test_the_process_starts_and_counts(tmp_path, fault):
    (tmp_path / "file").touch()
    places = {"missing": tmp_path / "missing", "file": tmp_path / "file", "unwritable": Path("/proc/self")}
    (tmp_path / "folder").mkdir()
    counted, warnings = counts(places.get(fault, tmp_path / "folder"), fault)
    assert counted['semblend_requests_total{outcome="backend_declined_reuse"}'] == 2
    assert counted['semblend_refusals_total{reason="deviation"}'] == 1
    assert counted['semblend_tokens_total{kind="reused"}'] == 8
    assert counted['semblend_router_refusals_total{reason="no_replica"}'] == 2
    assert warnings == (fault not in ("sound", "gone"))
    # Other processes read every file there is.
    assert all(path.stat().st_size for path in (tmp_path / "folder").glob("*.db"))
