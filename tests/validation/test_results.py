"""Result rows survive a round trip and cannot contradict themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from semblend_trt.errors import ConfigurationError
from validation import results
from validation.exactness import Exactness
from validation.record import end_to_end_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from validation.results import Measured, Row
    from validation.samples import Sample

FIELDS = {
    "name", "value", "unit", "goal", "better", "holds", "baseline", "command", "machine", "versions", "date",
}  # fmt: skip


def a_row(measured: Measured, name: str = "row", value: float = 2.0, goal: float | None = 1.0) -> Row:
    return results.row(name, value, "x", goal=goal, better="higher", baseline="cold", measured=measured)


def test_rows_round_trip_with_exactly_the_agreed_fields(tmp_path: Path, measured: Measured) -> None:
    rows = [a_row(measured), a_row(measured, "other", 0.5), a_row(measured, "free", 0.5, None)]
    results.write_rows(tmp_path / "cpu-2core" / "run.json", rows)
    assert results.read_rows(tmp_path) == {"cpu-2core/run": rows}
    written = json.loads((tmp_path / "cpu-2core" / "run.json").read_text())
    assert all(fields.keys() == FIELDS for fields in written)
    assert [each.holds for each in rows] == [True, False, True]


def test_lower_is_better_where_said(measured: Measured) -> None:
    row = results.row("drop", 0.02, "em", goal=0.02, better="lower", baseline="cold", measured=measured)
    assert row.holds
    with pytest.raises(ValueError, match="finite"):
        results.row("drop", float("nan"), "em", goal=0.02, better="lower", baseline="cold", measured=measured)


@pytest.mark.parametrize(
    "change",
    [{"holds": False}, {"value": "fast"}, {"better": "bigger"}, {"extra": 1}, {"date": "yesterday"}, {"name": "a b"}],
)
def test_a_file_with_a_bad_row_is_named(tmp_path: Path, measured: Measured, change: dict[str, object]) -> None:
    (tmp_path / "machine").mkdir()
    path = tmp_path / "machine" / "bad.json"
    path.write_text(json.dumps([a_row(measured).model_dump() | change]))
    with pytest.raises(ConfigurationError, match=r"bad\.json"):
        results.read_rows(tmp_path)


def test_a_file_that_holds_no_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"bad\.json"):
        results.read_rows(tmp_path)
    with pytest.raises(ConfigurationError, match="not a folder"):
        results.read_rows(tmp_path / "missing")


def test_a_machine_has_one_row_of_a_name(tmp_path: Path, measured: Measured) -> None:
    for name in ("one", "two"):
        results.write_rows(tmp_path / "machine" / f"{name}.json", [a_row(measured)])
    with pytest.raises(ConfigurationError, match="keep one"):
        results.read_rows(tmp_path)


def test_the_rows_of_a_run_have_their_names(make_sample: Callable[..., Sample], measured: Measured) -> None:
    samples = []
    for size in ("2k", "4k"):
        samples += [make_sample(size=size, arm="cold", speedup=1.0, ttft_s=0.4), make_sample(size=size)]
    samples.append(make_sample(workload="unrelated", expects="none", reused_tokens=0))
    rows = {row.name: row for row in end_to_end_rows(samples, Exactness(1e-5, "stock"), "cpu", measured)}
    assert list(rows) == [
        "cpu_shifted_2k_ttft_speedup",
        "cpu_shifted_4k_ttft_speedup",
        "cpu_harmless_em_drop",
        "cpu_unrelated_fires",
        "wrapper_exactness_max_logit_diff",
    ]
    assert all(row.holds for row in rows.values())
    assert rows["cpu_shifted_4k_ttft_speedup"].value == 4.0
    assert "400 ms" in rows["cpu_shifted_4k_ttft_speedup"].baseline
    assert not end_to_end_rows([make_sample(workload="prompts", size="any")], None, "cpu", measured)


def test_a_run_with_a_profile_and_a_trap_has_rows_of_both(
    make_sample: Callable[..., Sample], measured: Measured
) -> None:
    samples = [make_sample(size="2k", arm="cold", speedup=1.0, ttft_s=0.4)]
    samples += [make_sample(size="2k", arm=arm) for arm in ("position_fix", "verified")]
    samples += [
        make_sample(workload="header_trap", arm=arm, exact_match=right)
        for arm, right in (("cold", True), ("position_fix", False), ("verified", True))
    ]
    rows = {row.name: row for row in end_to_end_rows(samples, None, "cpu", measured)}
    assert rows["cpu_verified_2k_ttft_speedup"].value == 4.0
    assert "of which verified computes" in rows["cpu_verified_2k_ttft_speedup"].baseline
    assert (rows["cpu_verified_em_drop"].value, rows["cpu_verified_em_drop"].holds) == (0.0, True)
    assert (rows["cpu_trap_position_fix_em"].value, rows["cpu_trap_position_fix_em"].goal) == (0.0, 0.5)
    # The trap is no harmless prompt.
    assert rows["cpu_harmless_em_drop"].value == 0.0
