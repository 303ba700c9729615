"""The benchmark of receipts: a short run tells checked reuse from unchecked, and only what was compared counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.validation.benchmarks.dry_runs import dry_rows
from validation.benchmarks import receipts
from validation.benchmarks.receipts import Receipts

if TYPE_CHECKING:
    from pathlib import Path


def test_a_short_run_has_equal_answers_where_reuse_is_checked_and_others_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "TRAPS", ("header_trap", "near_duplicates"))
    monkeypatch.setattr(receipts, "QUESTIONS", 2)
    monkeypatch.setattr(receipts, "TOKENS", 512)
    rows = dry_rows(receipts, tmp_path, "--groups", "1")
    checked, control = rows["receipt_equal_share"], rows["receipt_equal_share_position_fix"]
    assert checked.value == 1.0
    assert control.value <= 0.5
    assert "4 equal; 2 of 2 with reused tokens equal" in checked.baseline
    assert " of 4 with reused tokens equal" in control.baseline


def test_only_what_was_compared_counts() -> None:
    found = Receipts()
    for result, reused in (("equal", 9), ("equal", 0), ("equal", 0), ("differs", 5), ("failed", 7)):
        found.add({"verified": {"result": result}, "reused_tokens": reused})
    assert found.equal_share == 0.75
    assert found.told == "1 differs, 3 equal, 1 failed; 1 of 2 with reused tokens equal"


def test_a_run_that_compared_nothing_has_no_share() -> None:
    found = Receipts()
    found.add({"verified": {"result": "failed"}, "reused_tokens": 0})
    with pytest.raises(ZeroDivisionError):
        _ = found.equal_share


def test_families_that_the_model_does_not_answer_cold_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "TRAPS", ("header_trap", "near_duplicates"))
    monkeypatch.setattr(receipts, "QUESTIONS", 1)
    monkeypatch.setattr(receipts, "TOKENS", 512)
    monkeypatch.setattr(receipts, "answered_cold", lambda *_: {"header_trap"})
    checked = dry_rows(receipts, tmp_path, "--groups", "1")["receipt_equal_share"]
    assert checked.baseline.startswith("1 of 2 trap families")
    assert checked.baseline.endswith(
        "1 equal; 0 of 0 with reused tokens equal; the other 1: 1 equal; 1 of 1 with reused tokens equal"
    )
