"""The page of settings has a section a theme, and every setting in it."""

from __future__ import annotations

import re
from pathlib import Path

from semblend_trt.config import Settings, settings_table
from semblend_trt.settings.page import settings_page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_in_the_repository_is_that_of_the_code() -> None:
    told = "docs/configuration.md is out of date; make it with `semblend-trt config --markdown > docs/configuration.md`"
    assert PAGE.read_text(encoding="utf-8") == settings_page(Settings), told


def test_every_setting_has_one_row_in_a_section_of_its_theme() -> None:
    page = settings_page(Settings)
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows == [row.variables[1] for row in settings_table()]
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert titles[0] == "What may be reused"
    assert len(titles) == len(Settings.__bases__)


def test_older_names_are_told() -> None:
    older = [name for row in settings_table() for name in row.variables[2:]]
    assert older
    assert [name for name in older if f"`{name}`" not in settings_page(Settings)] == []
