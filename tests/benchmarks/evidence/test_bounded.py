"""Rows of a calibration, its bounds and other choices of tokens, on the shipped model; what was served is kept."""

import json

import numpy as np
import pytest

from benchmarks.evidence import bounded
from benchmarks.evidence.bounded import RULES, Point, add_frontier, kl_at
from engine_wrapper.deviation_check import Budget
from validation.calibration import calibration
from validation.results import Results, rows_of

SMALL = ("--small", "--device", "cpu", "--families", "reordered,header_trap", "--groups", "4")
SMALL += ("--tokens", "344", "--max-tokens", "2")


def run(folder, *parts, questions=2):
    served = ("--test", "1", str(questions), "--kept", str(folder / "kept"), "--json", str(folder / "out"))
    bounded.main([*SMALL, *served, "--parts", *parts])


def test_parts_leave_rows_points_and_a_plot_and_go_on_from_what_was_served(tmp_path, monkeypatch):
    few = dict.fromkeys(bounded.LADDERS, ()) | {"profile": (0.05, 0.6), "all_tokens": (0.2,), "cacheblend": (15,)}
    monkeypatch.setattr(bounded, "LADDERS", few)
    monkeypatch.setattr(calibration, "_HEADS", (8,))
    run(tmp_path, "calibrate", "bounds")
    run(tmp_path, "frontier", "plot", questions=1)
    rows = {each.name: each for path in (tmp_path / "out").glob("*.json") for each in rows_of(path)}
    assert all(each.goal is None for each in rows.values())
    assert rows["calibrate_smollm2_minutes"].value > 0.0
    assert any(name.startswith("smollm2_bound_broken_header_trap_") for name in rows)
    points = tmp_path / "out" / bounded.POINTS
    lines = map(json.loads, points.read_text().splitlines())
    shown = {(family, arm): (share, kl) for family, arm, _, share, kl, _ in lines}
    assert shown["reordered", "position_fix"][0] == 0.0
    assert shown["reordered", "profile_0.05"][0] < shown["reordered", "profile_0.6"][0]
    assert shown["header_trap", "profile_0.6"][1] < 0.5 * shown["header_trap", "position_fix"][1]
    before = points.with_suffix(".svg").read_bytes()
    monkeypatch.setattr("validation.calibration.prepared.Observer._samples", None)
    run(tmp_path, "bounds")
    run(tmp_path, "frontier", "plot", questions=1)
    assert points.with_suffix(".svg").read_bytes() == before


def test_every_rule_keeps_the_budget_and_ranks_by_what_it_names():
    budget = Budget(0.5, np.array([3.0, 1.0, 0.1, 2.0], np.float32))
    deviations = np.array([0.1, 1.0, 9.0, 0.2], np.float32)
    chosen = {kind: np.flatnonzero(rule(budget, deviations)).tolist() for kind, rule in RULES.items()}
    assert chosen["profile"] == [1, 2]
    assert chosen["attention"] == [0, 3]
    assert len(chosen["random"]) == 2


def point(kind, share, kl, arm=None, family="order"):
    return Point(family, arm or kind, kind, share, kl, 300)


@pytest.mark.parametrize(("unchecked", "is_compared"), [(0.1, True), (0.0029, False)])
def test_choices_are_compared_where_reuse_is_worse_than_rounding(unchecked, is_compared):
    rows = Results([], "cpu", is_shown=False)
    kinds = {
        "floor": [point("floor", 1.0, 0.001)],
        "position_fix": [point("position_fix", 0.0, unchecked)],
        "profile": [point("profile", 0.1, 0.02), point("profile", 0.3, 0.005)],
        "cacheblend": [point("cacheblend", 0.2, 0.04, "cacheblend_15")],
    }
    add_frontier("order", kinds, rows)
    values = {each.name: (each.value, each.goal) for each in rows.rows}
    ratio = values.get("smollm2_selection_kl_over_cacheblend_order")
    assert (ratio == (pytest.approx(0.25), 0.5)) if is_compared else ratio is None
    # Its logarithm is interpolated.
    assert values["smollm2_kl_another_order_quarter"] == (pytest.approx(0.00707, rel=0.01), 0.012)
    assert kl_at(kinds["profile"], 0.05) is None
