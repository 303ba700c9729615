"""Counts come from the events of one arm, and warm-up requests are told apart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from validation.audit_log import AuditCounts, concerns, read_events

if TYPE_CHECKING:
    from pathlib import Path

EVENTS: list[dict[str, Any]] = [
    {"event": "scheduler_initialized"},
    {"event": "donor_registered", "donor_id": "abc-1", "token_count": 100, "error": None},
    {"event": "donor_registered", "donor_id": "abc-2", "token_count": 0, "error": "no room"},
    {"event": "lookup", "request_id": 3, "found": True, "num_new_matched_tokens": 90, "rejection_reason": None},
    {"event": "lookup", "request_id": 4, "found": False, "num_new_matched_tokens": 0, "rejection_reason": "no_donor"},
    {"event": "materialized", "request_id": 3, "materialized": 270, "requires_rope_correction": True},
    {"event": "materialized", "request_id": 5, "materialized": 30, "requires_rope_correction": False},
]


def test_counts_are_those_of_one_arm() -> None:
    events = [{**event, "arm": arm} for event in EVENTS for arm in ("boundary", "position_fix")]
    assert AuditCounts.of(events, "boundary") == AuditCounts(7, 1, 1, 2, 300, 90, 1, (("no_donor", 1),))
    assert AuditCounts.of(events, "cold") == AuditCounts()


def test_events_of_a_request_include_its_donor() -> None:
    about = [event for event in EVENTS if concerns(event, frozenset({1, 3}))]
    assert about == [EVENTS[1], EVENTS[3], EVENTS[5]]


def test_a_log_that_was_never_written_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "missing.jsonl") == []
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    assert read_events(tmp_path / "log.jsonl") == EVENTS
