"""The row of donors that are fetched ahead, on few passages."""

from __future__ import annotations

import json

from validation.benchmarks import near_donors


def test_the_row_says_how_many_were_in_memory(tmp_path):
    near_donors.main(["--passages", "2", "--json", str(tmp_path)])
    (row,) = json.loads((tmp_path / "near_donors.json").read_text())
    assert (row["name"], row["goal"], row["unit"]) == ("semantic_fetched_ahead_share", None, "of look-ups")
    assert 0 <= row["value"] <= 1
    assert "without an embedder 0" in row["baseline"]
