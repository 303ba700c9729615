"""The benchmark of the validation's time: its row comes from whole runs, and a run that fails gives none."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.validation.benchmarks.dry_runs import dry_rows
from validation.benchmarks import validate

if TYPE_CHECKING:
    from pathlib import Path

_STAND_IN = """
import sys
from pathlib import Path
for name in ("--output", "--audit-path"):
    Path(sys.argv[sys.argv.index(name) + 1]).touch(exist_ok=False)
"""


def test_the_row_is_the_median_of_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([4.0, 2.0])
    monkeypatch.setattr(validate, "waited", lambda _folder: next(times))
    row = dry_rows(validate, tmp_path, "--runs", "2")["validate_seconds"]
    assert (row.value, row.unit) == (3.0, "s")
    assert "median of 2.0, 4.0 s" in row.baseline


def test_a_run_writes_into_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert validate.COMMAND[1:] == ("-m", "validation")
    monkeypatch.setattr(validate, "COMMAND", (sys.executable, "-c", _STAND_IN))
    assert validate.waited(tmp_path) > 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["audit.jsonl", "report.json"]


def test_a_run_whose_gates_fail_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(subprocess.CalledProcessError):
        validate.waited(tmp_path)
