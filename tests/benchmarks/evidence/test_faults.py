"""Every injected fault costs a cold prefill and nothing else, and a defence that is missing is seen."""

from __future__ import annotations

import pytest

from benchmarks.evidence import faults
from benchmarks.evidence.faults import FAULTS, FaultBench, inject
from semblend_trt.donors import disk_tier
from tests.benchmarks.dry_runs import dry_rows

SEED = 1  # of which the worker is killed once the donor is saved


@pytest.fixture(scope="module")
def bench():
    made = FaultBench()
    yield made
    made.close()


@pytest.mark.parametrize("name", FAULTS)
def test_every_request_finishes_as_cold_and_the_fault_is_counted(bench, name):
    injection = inject(bench, name, SEED)
    assert (injection.wrong_tokens, injection.unfinished, injection.is_counted) == (0, 0, True)
    assert injection.survived
    # Behind the fault, or before it, donors are read; but for the file that is refused or fetched in vain.
    assert (injection.reused_tokens > 0) == (name not in ("corrupt_kv", "corrupt_text"))


def test_kv_that_is_not_checked_is_found_out(bench, monkeypatch):
    real = disk_tier._moved
    monkeypatch.setattr(disk_tier, "_moved", lambda *about: real(*about) and "unchecked")
    injection = inject(bench, "corrupt_kv", SEED)
    assert injection.wrong_tokens > 0
    assert not injection.survived


def test_rows_say_what_was_survived(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "FAULTS", {"provider_raises": FAULTS["provider_raises"]})
    rows = dry_rows(faults, tmp_path, "--rounds", "1")
    assert {name: row.value for name, row in rows.items()} == {"faults_survived": 1, "faults_wrong_tokens": 0}
    assert "provider_raises 1 of 1" in rows["faults_survived"].baseline
