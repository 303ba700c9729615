"""Rows of figures: what they say of themselves is true, a dry run promises nothing, and all is shown and written."""

import json

import pytest

from validation.results import Measured, Results, command, describe, versions

MEASURED = Measured("python -m benchmark", {"name": "cpu-2core"}, {"torch": "2.13.0"}, "2026-11-21")


def test_a_row_holds_where_its_value_meets_the_goal():
    def holds(value, goal, better):
        results = Results(measured=MEASURED)
        results.add("a", value, "x", "cold", goal, better)
        return results.rows[0].holds

    assert holds(0.02, 0.02, "lower")
    assert not holds(0.03, 0.02, "lower")
    assert holds(2, 1, "higher")
    assert not holds(0, 1, "higher")
    assert holds(7, None, "higher")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match=f"The row a has the value {value}"):
        Results(measured=MEASURED).add("a", value, "x", "cold")


def test_a_run_is_shown_as_it_goes_and_written_at_its_end(tmp_path, capsys):
    results = Results(measured=MEASURED)
    results.add("fast", 4, "x", "cold", 2, "higher")
    results.add("slow", 4, "ms", "cold", 2)
    assert "fast" in (shown := capsys.readouterr().out)
    assert [line.endswith("MISSED") for line in shown.splitlines()] == [False, True]
    earlier = tmp_path / "machine" / "run.json"
    earlier.parent.mkdir()
    earlier.write_text("earlier")
    with earlier.open() as reading:
        results.write(tmp_path / "machine", "run")
        assert reading.read() == "earlier"  # a file that is being read is replaced, not written into
    assert "cold" in capsys.readouterr().out
    written = json.loads((tmp_path / "machine" / "run.json").read_text())
    assert [(each["name"], each["goal"], each["holds"]) for each in written] == [("fast", 2, True), ("slow", 2, False)]
    assert {each["command"] for each in written} == {"python -m benchmark"}


def test_a_dry_run_has_no_goals_and_needs_a_folder_to_be_written(tmp_path):
    for dry in (True, False):
        results = Results(dry=dry, measured=MEASURED)
        results.add("slow", 4, "ms", "cold", 2)
        assert results.rows[0].goal == (None if dry else 2)
        results.write(None, f"dry-{dry}", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["dry-False.json"]


def test_a_row_tells_how_it_was_measured():
    told = Results(["--sizes", "1", "a b"], "cpu").measured
    assert told.command == command(["--sizes", "1", "a b"])
    assert told.command.endswith("--sizes 1 'a b'")
    assert told.versions == versions()
    assert "torch" in told.versions
    assert (told.machine["gpu"], told.machine["name"]) == (None, f"cpu-{told.machine['cores']}core")
    assert describe("cpu", "mine")["name"] == "mine"
