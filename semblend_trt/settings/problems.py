"""What is said of a setting that cannot be used: a wrong value, a name that no setting has."""

from __future__ import annotations

import difflib
import logging
import threading
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import ConfigurationError
from semblend_trt.settings.environment import PREFIXES, variable_in_use, variable_of
from semblend_trt.settings.table import allowed_by, is_secret

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails
    from pydantic_settings import BaseSettings

logger = logging.getLogger(__name__)

# What a value should have been whose error has a type that begins so.
_KINDS = (("int_", "whole number"), ("float_", "number"))
_warned: set[str] = set()
_warned_lock = threading.Lock()


def sentence_of(error: ValidationError, settings_class: type[BaseSettings], overrides: dict[str, Any]) -> str:
    """One sentence for each wrong setting, with its variable, its value and what is allowed."""
    return ". ".join(_sentence(each, settings_class, overrides) for each in error.errors(include_url=False))


def unknown_variables(names: Iterable[str], settings_class: type[BaseSettings]) -> dict[str, str | None]:
    """Those of `names` that have one of our prefixes and belong to no setting, each with the name that is most like it
    where one is."""
    known = [name for field in settings_class.model_fields.values() for name in variable_of(field).names]
    unknown = sorted(name for name in names if name.startswith(PREFIXES) and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None) for name in unknown}


def warn_of_unknown_variables(names: Iterable[str], settings_class: type[BaseSettings]) -> None:
    """Warns, once a process, of each of `names` that has one of our prefixes and belongs to no setting."""
    unknown = unknown_variables(names, settings_class)
    with _warned_lock:
        fresh = [name for name in unknown if name not in _warned]
        _warned.update(fresh)
    for name in fresh:
        close = unknown[name]
        logger.warning("%s is not read by this version%s", name, f"; did you mean {close}?" if close else "")


def _sentence(detail: ErrorDetails, settings_class: type[BaseSettings], overrides: dict[str, Any]) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else "settings"
    field = settings_class.model_fields.get(name)
    if field is None:
        close = difflib.get_close_matches(name, settings_class.model_fields, n=1)
        return f"{name} is not a setting" + (f"; did you mean {close[0]}?" if close else "")
    source = name if name in overrides else variable_in_use(field) or name
    problem = detail.get("ctx", {}).get("error")
    if isinstance(problem, ConfigurationError):
        return f"{source}: {problem}"
    value = "wrong" if is_secret(field) else repr(str(detail["input"])[:80])
    kind = next((f", no {kind}" for start, kind in _KINDS if detail["type"].startswith(start)), "")
    return f"{source} is {value}{kind}; allowed is {allowed_by(field)}"
