"""Where a setting is read from: the variables of its field, by their exact names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PREFIXES = ("TRTLLM_SEMBLEND_", "SEMBLEND_")


@dataclass(frozen=True, slots=True)
class Variable:
    """The variable of a setting: its name behind the prefixes, and the whole name it had before."""

    name: str
    old_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Whole names, the deciding one first."""
        current = tuple(prefix + self.name for prefix in PREFIXES)
        return current if self.old_name is None else (*current, self.old_name)


class SettingsGroup(BaseSettings):
    """Settings of one theme. Arguments win over the environment; every field names its `Variable`."""

    # A wrong value may be a secret, and an error's text is in every traceback.
    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, hide_input_in_errors=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class names it
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)


class _Environment(PydanticBaseSettingsSource):
    """Reads the variables that the fields name; an empty one counts as unset."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        found = variable_in_use(field)
        return (None if found is None else os.environ[found].strip()), field_name, False

    def __call__(self) -> dict[str, Any]:
        return {
            name: os.environ[found].strip()
            for name, field in self.settings_cls.model_fields.items()
            if (found := variable_in_use(field)) is not None
        }


def variable_of(field: FieldInfo) -> Variable:
    return next(item for item in field.metadata if isinstance(item, Variable))


def variable_in_use(field: FieldInfo) -> str | None:
    """Whole name of the variable that decides the field now; None when none is set."""
    return next((name for name in variable_of(field).names if os.environ.get(name, "").strip()), None)
