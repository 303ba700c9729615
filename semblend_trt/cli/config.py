"""Prints every setting, its value, and the variable that gave it.

Passwords and tokens are masked. It exits with 2 when a setting cannot be used, and says which.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pydantic import SecretStr

from semblend_trt.command_line import printable
from semblend_trt.config import (
    Settings,
    SettingsGroup,
    allowed_by,
    load_settings,
    unknown_variables,
    variable_in_use,
    variables_of,
)

if TYPE_CHECKING:
    import argparse

    from pydantic import JsonValue

MASK = "********"
# Servers that are named without a user or a password: nothing of it is secret.
_PLAIN_SERVER = re.compile(r"(?:nats|tls|ws|wss)://(?:[\w.\-]+|\[[\da-fA-F:]+\])(?::\d{1,5})?/?")
SUMMARY = "print every setting, its value and where it came from"
_LONGEST_COLUMN = 40
_COLUMNS = "| variable | default | allowed | meaning |\n|---|---|---|---|\n"
_HEAD = """\
# Configuration

This page is made by `semblend-trt config --markdown`, and a test compares it with the code.

Settings are environment variables. Each is read as `TRTLLM_SEMBLEND_X` first, then as `SEMBLEND_X`, then under the
older name that its row gives. TensorRT-LLM hands only variables that begin with `TRTLLM` on to its workers: use that
prefix there. An empty variable counts as unset. A value out of range is refused by name, and a variable with one of the
prefixes that no setting has is warned about. `semblend-trt config` prints every setting, its value and the variable
that gave it. `semblend-trt doctor` says whether the settings can work on this machine.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON")
    about = "print the page of all settings and their meaning, without values"
    forms.add_argument("--markdown", action="store_true", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Print the settings. Raises ConfigurationError when one cannot be used."""
    if arguments.markdown:
        sys.stdout.write(settings_page())
        return 0
    rows, unknown = settings_in_use(load_settings()), unknown_variables(os.environ)
    if arguments.json:
        settings = [{**asdict(row), "source": row.source or "default"} for row in rows]
        sys.stdout.write(json.dumps({"settings": settings, "unknown": unknown}, indent=2) + "\n")
        return 0
    variables = max(len(row.variable) for row in rows)
    values = min(_LONGEST_COLUMN, max(len(shown(row.value)) for row in rows))
    for row in rows:
        also = f" ({', '.join(row.ignored)} set too, and not read)" if row.ignored else ""
        line = f"{row.variable:<{variables}}  {shown(row.value):<{values}}  {row.source or 'default'}{also}"
        sys.stdout.write(printable(line) + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class SettingInUse:
    """One setting as it decides now. Secret values are masked.

    `variable` is its name with the prefix SEMBLEND_; `source` is the variable that gave the value, None for the
    default; `ignored` are further variables of the setting that are set and not read."""

    name: str
    variable: str
    value: JsonValue
    source: str | None
    ignored: tuple[str, ...]


def settings_in_use(settings: Settings) -> list[SettingInUse]:
    """Return every setting, in the order of its fields; `settings` were read from this process's environment."""
    values, rows = settings.model_dump(mode="json"), []
    for name in type(settings).model_fields:
        held, names, source = getattr(settings, name), variables_of(name), variable_in_use(name)
        ignored = tuple(other for other in names if other != source and os.environ.get(other, "").strip())
        value = masked(held.get_secret_value()) if isinstance(held, SecretStr) else values[name]
        rows.append(SettingInUse(name, names[1], value, source, ignored))
    return rows


def masked(secret: str) -> str:
    """Return what may be shown of a secret: addresses of servers without user and password, of others nothing."""
    return secret if all(_PLAIN_SERVER.fullmatch(part.strip()) for part in secret.split(",")) else MASK


def shown(value: object) -> str:
    """Return a setting's value in the words of its variable."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(int(value))
    return str(value.value) if isinstance(value, Enum) else str(value)


def settings_page() -> str:
    """Return docs/configuration.md, made from the settings' fields: a table, with a line before each group."""
    page = f"{_HEAD}\n{_COLUMNS}"
    # pydantic takes the fields of the last base first.
    for group in (base for base in reversed(Settings.__bases__) if issubclass(base, SettingsGroup)):
        theme = (group.__doc__ or "").removeprefix("Settings of ").removesuffix(".")
        page += f"| **{theme[:1].upper() + theme[1:]}** | | | |\n"
        for name, field in group.model_fields.items():
            _, variable, *older = variables_of(name)
            meaning = " ".join([*str(field.description).split(), *(f"Older name: `{each}`." for each in older)])
            page += f"| `{variable}` | {shown(field.default)} | {allowed_by(field)} | {meaning} |\n"
    return page
