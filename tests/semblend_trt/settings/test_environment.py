"""A group of settings reads the variables that its fields name, and no others."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from semblend_trt.settings.environment import SettingsGroup, Variable, variable_in_use, variable_of


class Lamps(SettingsGroup):
    lamps: Annotated[int, Variable("TEST_LAMPS", "OLD_LAMPS")] = Field(3, ge=0, le=9)
    colour: Annotated[str, Variable("TEST_COLOUR")] = Field("white", min_length=1, max_length=8)


@pytest.mark.parametrize("deciding", range(3))
def test_the_first_variable_that_is_set_decides(deciding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TRTLLM_SEMBLEND_TEST_LAMPS", "SEMBLEND_TEST_LAMPS", "OLD_LAMPS")
    assert Variable("TEST_LAMPS", "OLD_LAMPS").names == names
    monkeypatch.setenv(names[0], "  ")
    for number, name in enumerate(names[deciding:]):
        monkeypatch.setenv(name, f" {number} ")
    assert Lamps().lamps == 0
    assert variable_in_use(Lamps.model_fields["lamps"]) == names[deciding]


def test_without_a_variable_the_default_holds_and_arguments_win() -> None:
    assert (Lamps().lamps, Lamps(lamps=7).lamps) == (3, 7)
    assert variable_in_use(Lamps.model_fields["lamps"]) is None
    assert variable_of(Lamps.model_fields["colour"]).names == ("TRTLLM_SEMBLEND_TEST_COLOUR", "SEMBLEND_TEST_COLOUR")


def test_a_field_name_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMPS", "7")
    monkeypatch.setenv("lamps", "7")
    assert Lamps().lamps == 3


def test_groups_refuse_what_is_out_of_range_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError):
        Lamps(tables=1)
    monkeypatch.setenv("OLD_LAMPS", "10")
    with pytest.raises(ValidationError):
        Lamps()
