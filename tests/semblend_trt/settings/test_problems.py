"""A wrong setting is told in one sentence, and a variable that no setting has once a process."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from semblend_trt.settings import problems
from semblend_trt.settings.environment import SettingsGroup, Variable


class Lamps(SettingsGroup):
    lamps: Annotated[int, Variable("TEST_LAMPS")] = Field(3, ge=0, le=9)
    shades: Annotated[int, Variable("TEST_SHADES")] = Field(3, ge=0, le=9)


def told(**overrides: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Lamps(**overrides)
    return problems.sentence_of(caught.value, Lamps, overrides)


def test_the_sentence_names_source_value_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(lamps=10) == "lamps is '10'; allowed is 0..9"
    assert (
        told(lamps=10, shades="x") == "lamps is '10'; allowed is 0..9. shades is 'x', no whole number; allowed is 0..9"
    )
    assert told(lamp=1) == "lamp is not a setting; did you mean lamps?"
    assert told(zzz=1) == "zzz is not a setting"
    monkeypatch.setenv("SEMBLEND_TEST_SHADES", "many")
    assert told() == "SEMBLEND_TEST_SHADES is 'many', no whole number; allowed is 0..9"


def test_unknown_variables_are_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(problems, "_warned", set())
    names = ["SEMBLEND_TEST_LAMP", "TRTLLM_SEMBLEND_TEST_SHADES", "SEMBLEND_ZZZ", "TRTLLM_OTHER", "HOME"]
    with caplog.at_level(logging.WARNING):
        problems.warn_of_unknown_variables(names, Lamps)
        problems.warn_of_unknown_variables(names, Lamps)
    assert [record.getMessage() for record in caplog.records] == [
        "SEMBLEND_TEST_LAMP is not read by this version; did you mean SEMBLEND_TEST_LAMPS?",
        "SEMBLEND_ZZZ is not read by this version",
    ]
