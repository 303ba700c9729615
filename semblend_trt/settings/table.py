"""Settings as documentation shows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args

from pydantic import SecretStr

from semblend_trt.settings.environment import variable_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as documentation shows it; `variables` in the order in which they decide."""

    name: str
    variables: tuple[str, ...]
    default: str
    allowed: str
    description: str


def rows_of(settings_class: type[BaseSettings]) -> list[SettingRow]:
    """Every setting of the class, in the order of its fields."""
    return [
        SettingRow(name, variable_of(field).names, shown(field.default), allowed_by(field), field.description or "")
        for name, field in settings_class.model_fields.items()
    ]


def allowed_by(field: FieldInfo) -> str:
    """The values that a field takes, in words."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, Enum):
        return ", ".join(each.value for each in field.annotation)
    if field.annotation is bool:
        return "0 or 1"
    low, high, longest = (_bound(field, name) for name in ("ge", "le", "max_length"))
    if low is not None and high is not None:
        return f"{low}..{high}"
    return "a path" if longest is None else f"a text of 1..{longest} characters"


def shown(value: object) -> str:
    """A setting's value in the words of its variable."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(int(value))
    return str(value.value) if isinstance(value, Enum) else str(value)


def is_secret(field: FieldInfo) -> bool:
    """True when the value may not be shown anywhere."""
    return SecretStr in (field.annotation, *get_args(field.annotation))


def _bound(field: FieldInfo, name: str) -> Any:
    return next((value for item in field.metadata if (value := getattr(item, name, None)) is not None), None)
