"""Counts come from the events of one arm, and warm-up requests are told apart."""

from __future__ import annotations

import json
from typing import Any

from validation.engines import AuditCounts, AuditFile, concerns

EVENTS: list[dict[str, Any]] = [
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
    assert AuditCounts.of(events, "boundary") == AuditCounts(7, 1, 1, 2, 300, 90, 1, (("no_donor", 1),))
    assert AuditCounts.of(events, "cold") == AuditCounts()


def test_events_of_a_request_include_its_donor():
    about = [event for event in EVENTS if concerns(event, frozenset({1, 3}))]
    assert about == [EVENTS[1], EVENTS[3], EVENTS[5]]


def test_a_log_is_read_as_it_grows_and_only_in_whole_lines(tmp_path):
    audit = AuditFile(tmp_path / "log.jsonl")
    audit.read()
    assert audit.events == []
    lines = [json.dumps(event) + "\n" for event in EVENTS]
    audit.path.write_text(lines[0] + lines[1][:9])
    audit.read()
    assert audit.events == EVENTS[:1]
    audit.path.write_text("".join(lines))
    audit.read()
    assert audit.events == EVENTS
