"""The page of all settings, docs/configuration.md, made from their fields."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from semblend_trt.settings.environment import SettingsGroup
from semblend_trt.settings.table import SettingRow, rows_of

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

_HEAD = """\
# Configuration

This page is made by `semblend-trt config --markdown`, and a test compares it with the code.

Settings are environment variables. Each is read as `TRTLLM_SEMBLEND_X` first, then as `SEMBLEND_X`, then under the
older name that its row gives. TensorRT-LLM hands only variables that begin with `TRTLLM` on to its workers: use that
prefix there. An empty variable counts as unset. A value out of range is refused by name, and a variable with one of the
prefixes that no setting has is warned about.

`semblend-trt config` prints every setting, its value and the variable that gave it. `semblend-trt doctor` says whether
the settings can work on this machine.
"""
_COLUMNS = "| variable | default | allowed | meaning |\n|---|---|---|---|\n"


def settings_page(settings_class: type[BaseSettings]) -> str:
    """The page in Markdown, a section for each group of settings that the class joins."""
    # pydantic takes the fields of the last base first.
    groups = [base for base in reversed(settings_class.__bases__) if issubclass(base, SettingsGroup)]
    sections = [f"\n## {_title(group)}\n\n{_COLUMNS}{''.join(map(_line, rows_of(group)))}" for group in groups]
    return _HEAD + "".join(sections)


def _title(group: type[SettingsGroup]) -> str:
    """The theme of a group, as its module says it: "Settings of THEME."."""
    told = (sys.modules[group.__module__].__doc__ or group.__name__).split("\n", 1)[0]
    theme = told.removeprefix("Settings of ").removesuffix(".")
    return theme[:1].upper() + theme[1:]


def _line(row: SettingRow) -> str:
    _, name, *older = row.variables
    also = "".join(f" Older name: `{each}`." for each in older)
    return f"| `{name}` | {row.default} | {row.allowed} | {row.description}{also} |\n"
