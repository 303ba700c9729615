"""Rows of settings say the default and what is allowed in the words of the variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from semblend_trt.policy import ReusePolicy
from semblend_trt.settings.environment import SettingsGroup, Variable
from semblend_trt.settings.table import SettingRow, rows_of


class Everything(SettingsGroup):
    on: Annotated[bool, Variable("ON")] = Field(True, description="A switch.")
    count: Annotated[int, Variable("COUNT", "OLD_COUNT")] = Field(2, ge=1, le=9)
    share: Annotated[float, Variable("SHARE")] = Field(0.5, ge=0.0, le=1.0)
    path: Annotated[Path | None, Variable("PATH")] = Field(None)
    name: Annotated[str | None, Variable("NAME")] = Field(None, min_length=1, max_length=20)
    policy: Annotated[ReusePolicy, Variable("POLICY")] = Field(ReusePolicy.EXACT)


def test_every_kind_of_setting_has_its_words() -> None:
    rows = rows_of(Everything)
    assert [(row.name, row.default, row.allowed) for row in rows] == [
        ("on", "1", "0 or 1"),
        ("count", "2", "1..9"),
        ("share", "0.5", "0.0..1.0"),
        ("path", "unset", "a path"),
        ("name", "unset", "a text of 1..20 characters"),
        ("policy", "exact", ", ".join(policy.value for policy in ReusePolicy)),
    ]
    assert rows[0] == SettingRow("on", ("TRTLLM_SEMBLEND_ON", "SEMBLEND_ON"), "1", "0 or 1", "A switch.")
    assert rows[1].variables[2] == "OLD_COUNT"
