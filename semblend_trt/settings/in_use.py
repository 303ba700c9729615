"""The settings of this process: each with its value, and the variable that gave it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import SecretStr

from semblend_trt.settings.environment import variable_in_use, variable_of
from semblend_trt.settings.table import shown

if TYPE_CHECKING:
    from pydantic import JsonValue
    from pydantic_settings import BaseSettings

MASK = "********"
# Servers that are named without a user or a password: nothing of it is secret.
_PLAIN_SERVER = re.compile(r"(?:nats|tls|ws|wss)://(?:[\w.\-]+|\[[\da-fA-F:]+\])(?::\d{1,5})?/?")


@dataclass(frozen=True, slots=True)
class SettingInUse:
    """One setting as it decides now.

    `variable` is its name with the prefix SEMBLEND_; `source` is the variable that gave the value, None for the
    default; `ignored` are further variables of the setting that are set and not read. Secret values are masked.
    """

    name: str
    variable: str
    value: JsonValue
    source: str | None
    ignored: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The value in the words of its variable."""
        return shown(self.value)


def settings_in_use(settings: BaseSettings) -> list[SettingInUse]:
    """Every setting, in the order of its fields; `settings` have been read from this process's environment."""
    values, rows = settings.model_dump(mode="json"), []
    for name, field in type(settings).model_fields.items():
        held, names = getattr(settings, name), variable_of(field).names
        source = variable_in_use(field)
        ignored = tuple(other for other in names if other != source and os.environ.get(other, "").strip())
        value = masked(held.get_secret_value()) if isinstance(held, SecretStr) else values[name]
        rows.append(SettingInUse(name, names[1], value, source, ignored))
    return rows


def masked(secret: str) -> str:
    """What may be shown of a secret: addresses of servers that hold no user and no password, of others nothing."""
    are_plain = all(_PLAIN_SERVER.fullmatch(part.strip()) for part in secret.split(","))
    return secret if are_plain else MASK
