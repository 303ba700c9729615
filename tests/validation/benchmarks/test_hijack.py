"""A planter in the victim's own tenant: what stands in the rows, and that a check which sees nothing is found out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from semblend_trt.reuse_profile import ReuseProfile
from validation import models
from validation.benchmarks import hijack, plants
from validation.benchmarks.hijack import attack
from validation.benchmarks.plants import Search

SEARCH = Search(tries=3, victims=2)


@pytest.fixture(autouse=True)
def two_constructions(monkeypatch):
    for module in (hijack, plants):
        monkeypatch.setattr(module, "CONSTRUCTIONS", ("header_trap", "alias_trap"))


@pytest.fixture
def shipped():
    return hijack.shipped()


def test_rows_tell_every_policys_wrong_answers(tmp_path) -> None:
    hijack.main(["--tries", "3", "--victims", "2", "--json", str(tmp_path)])
    rows = {row["name"]: row for row in json.loads((tmp_path / "hijack.json").read_text())}
    assert rows["hijacked_answers_exact"]["value"] == rows["hijacked_answers_verified"]["value"] == 0
    assert rows["hijacked_answers_position_fix"]["value"] >= 3
    assert {f"hijacked_answers_{name}" for name in ("exact", *hijack.ARMS)} == set(rows)
    assert hijack.SKIPPED in rows["hijacked_answers_verified"]["baseline"]


def test_a_check_that_sees_nothing_is_found_out(shipped, tmp_path) -> None:
    profile = ReuseProfile.read(shipped.profile)
    assert profile.check is not None
    blind = profile.model_copy(update={"check": profile.check.model_copy(update={"layer": 1, "threshold": 1.0})})
    blind.write(tmp_path / "profile.json")
    found = attack(replace(shipped, profile=tmp_path / "profile.json"), SEARCH)
    assert found.hijacked["verified"] >= 3
    assert found.fires["verified"] >= 3
    assert found.wrong["exact"] == 0


def test_the_planter_takes_what_changes_most_of_what_passes(shipped) -> None:
    runner = models.load(None, "cpu", "float32")
    profile = ReuseProfile.read(shipped.profile)
    assert profile.check is not None
    half = profile.model_copy(update={"check": profile.check.model_copy(update={"threshold": 0.8})})
    found = plants.Plants(runner, half, Search(tries=8, victims=8))
    ordered = [found._weakness(case) for case in found._strongest_of("header_trap")]
    passed, noticed = ([mean for is_noticed, mean in ordered if is_noticed is kind] for kind in (False, True))
    assert ordered == [(False, mean) for mean in sorted(passed)] + [(True, mean) for mean in sorted(noticed)]
    assert passed
    assert noticed
    assert max(passed) < 0 < min(noticed)
