"""An arm's engine sees exactly the arm's settings, and its audit log is counted by arm and without warm-up requests."""

import json
import os

import pytest

from validation.engines import AuditFile, audit_counts, environment
from validation.measurement import concerns

EVENTS = [
    {"event": "scheduler_initialized"},
    {"event": "donor_registered", "donor_id": "abc-1", "token_count": 100, "error": None},
    {"event": "donor_registered", "donor_id": "abc-2", "token_count": 0, "error": "no room"},
    {"event": "lookup", "request_id": 3, "found": True, "num_new_matched_tokens": 90, "rejection_reason": None},
    {"event": "lookup", "request_id": 4, "found": False, "num_new_matched_tokens": 0, "rejection_reason": "no_donor"},
    {"event": "materialized", "request_id": 3, "materialized": 270, "requires_rope_correction": True},
    {"event": "materialized", "request_id": 5, "materialized": 30, "requires_rope_correction": False},
]


def test_counts_are_those_of_one_arm():
    events = [{**event, "arm": arm} for event in EVENTS for arm in ("boundary", "position_fix")]
    *counts, reasons = audit_counts(events, "boundary").values()
    assert (counts, reasons) == ([7, 1, 1, 2, 300, 90, 1], {"no_donor": 1})
    assert not any(audit_counts(events, "cold").values())


def test_events_of_a_request_include_its_donor():
    about = [event for event in EVENTS if concerns(event, frozenset({1, 3}))]
    assert about == [EVENTS[1], EVENTS[3], EVENTS[5]]


def test_a_log_is_read_as_it_grows_and_only_in_whole_lines(tmp_path):
    audit = AuditFile(tmp_path / "log.jsonl")
    assert audit.read() == []
    lines = [json.dumps(event) + "\n" for event in EVENTS]
    audit.path.write_text(lines[0] + lines[1][:9])
    assert audit.read() == EVENTS[:1]
    audit.path.write_text("".join(lines))
    assert audit.read() == EVENTS


def test_the_callers_settings_neither_leak_in_nor_get_lost(monkeypatch):
    monkeypatch.setenv("TRTLLM_SEMBLEND_POLICY", "off")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "7")
    monkeypatch.setenv("SEMBLENDER", "another program's")
    before = dict(os.environ)
    with pytest.raises(RuntimeError), environment({"SEMBLEND_POLICY": "boundary"}):  # noqa: PT012
        ours = {name: value for name, value in os.environ.items() if "SEMBLEND_" in name}
        assert ours == {"SEMBLEND_POLICY": "boundary", "SEMBLEND_MIN_SAVING": "0"}
        assert os.environ["SEMBLENDER"] == "another program's"
        raise RuntimeError
    assert dict(os.environ) == before
