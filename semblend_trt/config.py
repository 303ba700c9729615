"""Settings: one object, read from the environment, with every variable named, documented and range-checked.

A setting is looked for as TRTLLM_SEMBLEND_X, then SEMBLEND_X, then under the name that the SemBlend package gave it;
TensorRT-LLM hands only TRTLLM* variables on to its workers. An empty variable counts as unset.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from semblend_trt.errors import ConfigurationError
from semblend_trt.policy import ReusePolicy, parse_policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic.fields import FieldInfo

logger = logging.getLogger(__name__)

_PREFIXES = ("TRTLLM_SEMBLEND_", "SEMBLEND_")
_warned: set[str] = set()
_warned_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Variable:
    """The variable of a setting: its name behind the prefixes, and the whole name it had before."""

    name: str
    old_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Whole names, the deciding one first."""
        current = tuple(prefix + self.name for prefix in _PREFIXES)
        return current if self.old_name is None else (*current, self.old_name)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as documentation shows it; `variables` in the order in which they decide."""

    name: str
    variables: tuple[str, ...]
    default: str
    allowed: str
    description: str


class _Environment(PydanticBaseSettingsSource):
    """Reads the variables that the fields name, by their exact names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        found = _variable_in_use(field)
        return (None if found is None else os.environ[found].strip()), field_name, False

    def __call__(self) -> dict[str, Any]:
        return {
            name: os.environ[found].strip()
            for name, field in self.settings_cls.model_fields.items()
            if (found := _variable_in_use(field)) is not None
        }


class Settings(BaseSettings):
    """What a user may set. Arguments win over the environment; see `load_settings` for errors of our own."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    enabled: Annotated[bool, Variable("ENABLED")] = Field(
        True, description="Master switch; without it every request is served cold and nothing is kept."
    )
    policy: Annotated[ReusePolicy, BeforeValidator(parse_policy), Variable("POLICY")] = Field(
        ReusePolicy.VERIFIED,
        description="What may be reused: nothing; KV equal to a cold run's; what the reuse profile justifies, without "
        "one as exact; runs at any position with the lowest layers computed again; runs at any position as they are; "
        "and two published fixed budgets, there to be compared with and not safe.",
    )
    profile_path: Annotated[Path | None, Variable("PROFILE")] = Field(
        None, description="JSON file of the reuse profile for policy verified, made by a calibration."
    )
    recompute_boundary_layer: Annotated[
        int, Variable("RECOMPUTE_BOUNDARY_LAYER", "SEMBLEND_TRTLLM_RECOMPUTE_BOUNDARY_LAYER")
    ] = Field(0, ge=0, le=4096, description="Policy boundary computes this many lowest layers for every token.")
    epic_tokens: Annotated[int, Variable("EPIC_TOKENS")] = Field(
        16, ge=1, le=1 << 20, description="Policy epic computes this many first tokens of every run."
    )
    cacheblend_share: Annotated[float, Variable("CACHEBLEND_SHARE")] = Field(
        0.15,
        ge=0.0,
        le=1.0,
        description="Policy cacheblend computes this share of the reused tokens, those that deviate most at layer 1.",
    )
    min_span_tokens: Annotated[int, Variable("MIN_SPAN", "SEMBLEND_TRTLLM_MIN_MATCH_LENGTH")] = Field(
        64,
        ge=1,
        le=1 << 20,
        description="Shortest token-identical run that is reused; runs below 32 tokens are not looked for.",
    )
    min_reuse_ratio: Annotated[float, Variable("MIN_REUSE_RATIO")] = Field(
        0.5, ge=0.0, le=1.0, description="Least share of the prompt's uncomputed tokens that a plan must reuse."
    )
    discovery_only: Annotated[bool, Variable("DISCOVERY_ONLY")] = Field(
        False, description="Look donors up and report what would be reused, but place nothing."
    )
    host_bytes: Annotated[int, Variable("HOST_BYTES")] = Field(
        4 << 30,
        ge=0,
        le=1 << 50,
        description=(
            "Host memory for donor KV, in bytes, page-locked at the start where there is a card; least recently used "
            "donors go first."
        ),
    )
    # Off unless asked for: the engine has sized its own KV pool to the card's free memory before it registers it, and
    # what is left is room that its forward needs. An arena has to be planned together with the engine's share.
    device_bytes: Annotated[int, Variable("DEVICE_BYTES")] = Field(
        0,
        ge=0,
        le=1 << 50,
        description="Device memory for donor KV, in bytes, allocated at the start beside the engine's pool; lower the "
        "engine's memory fraction by it. When it is full, donors move down to host memory.",
    )
    staging_bytes: Annotated[int, Variable("STAGING_BYTES")] = Field(
        256 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="Device memory through which donors travel from and to host memory, in bytes; without a card none "
        "is used.",
    )
    max_donors: Annotated[int, Variable("MAX_DONORS")] = Field(
        10_000, ge=1, le=10_000_000, description="Most donors held at once."
    )
    min_donor_tokens: Annotated[int, Variable("MIN_DONOR_TOKENS")] = Field(
        64, ge=1, le=1 << 20, description="A request with fewer tokens does not become a donor."
    )
    donor_tenant: Annotated[str | None, Variable("DONOR_TENANT")] = Field(
        None, min_length=1, max_length=256, description="Tenant of this engine; other tenants share no donors with it."
    )
    donor_template: Annotated[str | None, Variable("DONOR_TEMPLATE")] = Field(
        None,
        min_length=1,
        max_length=256,
        description="Prompt template of this engine; others share no donors with it.",
    )
    model_revision: Annotated[str | None, Variable("MODEL_REVISION")] = Field(
        None, min_length=1, max_length=256, description="Model revision; unset, a digest of the weights stands for it."
    )
    tokenizer_revision: Annotated[str | None, Variable("TOKENIZER_REVISION")] = Field(
        None, min_length=1, max_length=256, description="Tokenizer revision; unset, it is taken from the files."
    )
    adapter_id: Annotated[str | None, Variable("ADAPTER_ID")] = Field(
        None, min_length=1, max_length=256, description="Adapter that this engine applies to every request."
    )
    audit_path: Annotated[Path | None, Variable("AUDIT_PATH", "SEMBLEND_TRTLLM_AUDIT_PATH")] = Field(
        None, description="JSONL file to which audit events are appended; unset, none are written."
    )
    metrics: Annotated[bool, Variable("METRICS")] = Field(
        True, description="Counts in Prometheus' default registry, where prometheus_client is installed."
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


def load_settings(**overrides: Any) -> Settings:
    """Reads the settings; `overrides` win over the environment.

    Raises ConfigurationError naming the variable, its value and the bound. A SEMBLEND_* variable that no setting has is
    warned about once a process.
    """
    _warn_of_unknown_variables(os.environ)
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise ConfigurationError(_sentence(error, overrides)) from error


def settings_table() -> list[SettingRow]:
    """Every setting, in the order of declaration, for documentation."""
    return [
        SettingRow(name, _variable(field).names, _shown(field.default), _allowed(field), field.description or "")
        for name, field in Settings.model_fields.items()
    ]


def _variable(field: FieldInfo) -> Variable:
    return next(item for item in field.metadata if isinstance(item, Variable))


def _variable_in_use(field: FieldInfo) -> str | None:
    return next((name for name in _variable(field).names if os.environ.get(name, "").strip()), None)


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(int(value))
    return value.value if isinstance(value, ReusePolicy) else str(value)


def _allowed(field: FieldInfo) -> str:
    if field.annotation is ReusePolicy:
        return ", ".join(policy.value for policy in ReusePolicy)
    if field.annotation is bool:
        return "0 or 1"
    low, high, longest = (_bound(field, name) for name in ("ge", "le", "max_length"))
    if low is not None and high is not None:
        return f"{low}..{high}"
    return "a path" if longest is None else f"a text of 1..{longest} characters"


def _bound(field: FieldInfo, name: str) -> Any:
    return next((value for item in field.metadata if (value := getattr(item, name, None)) is not None), None)


def _sentence(error: ValidationError, overrides: dict[str, Any]) -> str:
    details = error.errors(include_url=False)
    first = details[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    field = Settings.model_fields.get(name)
    if field is None:
        close = difflib.get_close_matches(name, Settings.model_fields, n=1)
        return f"{name} is not a setting" + (f"; did you mean {close[0]}?" if close else "")
    source = name if name in overrides else _variable_in_use(field) or name
    problem = first.get("ctx", {}).get("error")
    more = f" ({len(details) - 1} more settings are wrong)" if len(details) > 1 else ""
    if isinstance(problem, ConfigurationError):
        return f"{source}: {problem}{more}"
    return f"{source} is {str(first['input'])[:80]!r}; allowed is {_allowed(field)}{more}"


def _warn_of_unknown_variables(names: Iterable[str]) -> None:
    known = [name for field in Settings.model_fields.values() for name in _variable(field).names]
    unknown = sorted(name for name in names if name.startswith(_PREFIXES) and name not in known)
    with _warned_lock:
        fresh = [name for name in unknown if name not in _warned]
        _warned.update(fresh)
    for name in fresh:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        logger.warning("%s is not read by this version%s", name, f"; did you mean {close[0]}?" if close else "")
