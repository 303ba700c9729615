"""Prints every setting, its value, and the variable that gave it.

Passwords and tokens are masked. It exits with 2 when a setting cannot be used, and says which.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from semblend_trt.printable import printable

if TYPE_CHECKING:
    import argparse

    from semblend_trt.settings.in_use import SettingInUse

SUMMARY = "print every setting, its value and where it came from"
_LONGEST_COLUMN = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the forms in which the settings can be printed."""
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON")
    forms.add_argument(
        "--markdown", action="store_true", help="print the page of all settings and their meaning, without values"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints. Raises ConfigurationError when a setting cannot be used."""
    from semblend_trt.config import Settings, load_settings
    from semblend_trt.settings.in_use import settings_in_use
    from semblend_trt.settings.page import settings_page
    from semblend_trt.settings.problems import unknown_variables

    if arguments.markdown:
        sys.stdout.write(settings_page(Settings))
        return 0
    rows, unknown = settings_in_use(load_settings()), unknown_variables(os.environ, Settings)
    if arguments.json:
        sys.stdout.write(json.dumps({"settings": [_fields(row) for row in rows], "unknown": unknown}, indent=2) + "\n")
    else:
        sys.stdout.write(_table(rows))
    return 0


def _fields(row: SettingInUse) -> dict[str, object]:
    return {
        "name": row.name,
        "variable": row.variable,
        "value": row.value,
        "source": row.source or "default",
        "ignored": list(row.ignored),
    }


def _table(rows: list[SettingInUse]) -> str:
    variables = max(len(row.variable) for row in rows)
    values = min(_LONGEST_COLUMN, max(len(row.text) for row in rows))
    return "".join(
        printable(f"{row.variable:<{variables}}  {row.text:<{values}}  {_source(row)}") + "\n" for row in rows
    )


def _source(row: SettingInUse) -> str:
    also = f" ({', '.join(row.ignored)} set too, and not read)" if row.ignored else ""
    return (row.source or "default") + also
