"""A planter in the victim's own tenant: what stands in the rows, and that a check which sees nothing is found out."""

import pytest

from benchmarks.evidence import hijack
from benchmarks.evidence.hijack import attack
from semblend_trt.reuse_profile import ReuseProfile, terms_name
from tests.benchmarks.dry_runs import dry_rows
from tests.semblend_trt.test_reuse_profile import evidence
from validation.models import PROFILE_NAME, shipped_model


@pytest.fixture(autouse=True)
def two_constructions(monkeypatch):
    monkeypatch.setattr(hijack, "CONSTRUCTIONS", ("header_trap", "alias_trap"))
    monkeypatch.setattr(hijack, "ARMS", ("verified", "position_fix"))


@pytest.mark.promise("policies", "What planted documents do to answers is measured under every policy")
def test_rows_tell_every_policys_wrong_answers(tmp_path):
    rows = dry_rows(hijack, tmp_path, "--tries", "3", "--victims", "2")
    assert rows["hijacked_answers_exact"].value == rows["hijacked_answers_verified"].value == 0
    assert rows["hijacked_answers_position_fix"].value >= 3
    assert {f"hijacked_answers_{name}" for name in ("exact", *hijack.ARMS)} == set(rows)
    assert "no other model was named" in rows["hijacked_answers_verified"].baseline


def test_a_check_that_sees_nothing_is_found_out(tmp_path):
    shipped = shipped_model()
    profile = ReuseProfile.read(shipped / PROFILE_NAME)
    check = profile.check.model_copy(update={"layer": 1, "threshold": 0.99})
    forged = evidence(terms_name("verified", check))
    blind = profile.model_copy(update={"check": check, "figures": forged})
    blind.write(tmp_path / "profile.json")
    found = attack(shipped, tmp_path / "profile.json", tries=3, victims=2)
    assert found.hijacked["verified"] >= 3
    assert found.fires["verified"] >= 3
    assert found.wrong["exact"] == 0
