"""The rows of the store's room, on a short conversation."""

from __future__ import annotations

from benchmarks.donors import store_room
from tests.benchmarks.dry_runs import dry_rows


def test_a_conversation_takes_its_own_room_and_short_answers_evict_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(store_room, "PRECISION", 0.5)
    rows = dry_rows(store_room, tmp_path, "--turns", "4")
    assert rows["conversation_room_ratio"].value < 2
    assert rows["evicted_by_unused_room"].value == 0
