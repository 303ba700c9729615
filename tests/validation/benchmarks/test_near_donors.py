"""The row of donors that are fetched ahead, on few passages."""

from __future__ import annotations

from tests.validation.benchmarks.dry_runs import dry_rows
from validation.benchmarks import near_donors


def test_the_row_says_how_many_were_in_memory(tmp_path):
    row = dry_rows(near_donors, tmp_path, "--passages", "2")["semantic_fetched_ahead_share"]
    assert row.unit == "of look-ups"
    assert 0 <= row.value <= 1
    assert "without an embedder 0" in row.baseline
