"""Profiles of several seeds: what stands in the rows, that made profiles are kept, and that a poor one is told of."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from benchmarks.commands.calibration import add_rows, main, reused_share
from semblend_trt.reuse_profile import ReuseProfile
from validation.models import PROFILE_NAME, shipped_model
from validation.results import Results
from validation.scoreboard import read_rows

if TYPE_CHECKING:
    from pathlib import Path

SHORT = ("--families", "reordered,header_trap", "--groups", "8", "--budget", "16", "--screening-groups", "15")
SHORT += ("--margin", "0.5", "--tokens", "512", "--max-tokens", "8", "--sample-tries", "0", "--generations", "0")


def test_a_dry_run_makes_profiles_once_and_holds_each_on_other_prompts(tmp_path: Path) -> None:
    asked = ["--name", "shipped", "--folder", str(tmp_path / "made"), "--seeds", "1", "--json", str(tmp_path / "rows")]
    main([*asked, "--", *SHORT])
    rows = {row.name: row for row in read_rows(tmp_path / "rows")["calibration_shipped"]}
    assert {name: row.goal for name, row in rows.items()} == dict.fromkeys(
        [f"calibration_{each}_shipped" for each in ("alike", "policy", "threshold_spread", "confirmed")]
    )
    assert rows["calibration_confirmed_shipped"].value in (0.0, 1.0)
    first = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    main([*asked, "--at-once", "2", "--devices", "cpu,cpu", "--", *SHORT])
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}.items() >= first.items()


def test_a_command_that_ends_with_an_error_ends_the_run(tmp_path: Path) -> None:
    asked = ["--name", "none", "--folder", str(tmp_path), "--seeds", "2", "--at-once", "2"]
    with pytest.raises(subprocess.CalledProcessError):
        main([*asked, "--", "--model", str(tmp_path / "nothing")])


@pytest.fixture
def profile() -> ReuseProfile:
    return ReuseProfile.read(shipped_model() / PROFILE_NAME)


def test_rows_tell_other_layers_wider_thresholds_and_what_does_not_hold(profile: ReuseProfile) -> None:
    def with_check(**fields: object) -> ReuseProfile:
        return profile.model_copy(update={"check": profile.check.model_copy(update=fields)})

    rows = Results(dry=False, is_shown=False)
    threshold = profile.check.threshold
    add_rows(rows, "m", [profile, profile, with_check(layer=3), with_check(threshold=2 * threshold)], [True, False])
    found = {row.name: row for row in rows.rows}
    assert found["calibration_alike_m"].value == 0.75
    assert found["calibration_threshold_spread_m"].value == pytest.approx(2.0)
    assert (found["calibration_confirmed_m"].value, found["calibration_confirmed_m"].holds) == (0.5, False)
    assert (found["calibration_policy_m"].value, 0.8 < reused_share(profile) < 1.0) == (1.0, True)
    exact = profile.model_copy(update={"policy": "exact", "check": None, "head_tokens": 0})
    rows = Results(dry=False, is_shown=False)
    add_rows(rows, "m", [exact, exact], [])
    assert {row.name: row.value for row in rows.rows} == {"calibration_alike_m": 1.0, "calibration_policy_m": 0.0}
