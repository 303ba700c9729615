"""Settings: one object, read from the environment, with every variable named, documented and range-checked.

A setting is looked for as TRTLLM_SEMBLEND_X, then SEMBLEND_X, then under the name that the SemBlend package gave it;
TensorRT-LLM hands only TRTLLM* variables on to its workers. An empty variable counts as unset.
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import ValidationError

from semblend_trt.errors import ConfigurationError
from semblend_trt.settings.discovery import DiscoverySettings
from semblend_trt.settings.donors import DonorSettings
from semblend_trt.settings.environment import Variable
from semblend_trt.settings.fleet import FleetSettings
from semblend_trt.settings.identity import IdentitySettings
from semblend_trt.settings.problems import sentence_of, warn_of_unknown_variables
from semblend_trt.settings.reporting import ReportingSettings
from semblend_trt.settings.reuse import ReuseSettings
from semblend_trt.settings.table import SettingRow, rows_of

__all__ = ["SettingRow", "Settings", "Variable", "load_settings", "settings_table"]


# pydantic takes the fields of the last base first, so documentation shows the groups from the last to the first.
class Settings(FleetSettings, ReportingSettings, IdentitySettings, DonorSettings, DiscoverySettings, ReuseSettings):
    """What a user may set. Arguments win over the environment; see `load_settings` for errors of our own."""


def load_settings(**overrides: Any) -> Settings:
    """Reads the settings; `overrides` win over the environment.

    Raises ConfigurationError naming the variable, its value and the bound. A SEMBLEND_* variable that no setting has is
    warned about once a process.
    """
    warn_of_unknown_variables(os.environ, Settings)
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise ConfigurationError(sentence_of(error, Settings, overrides)) from error


def settings_table() -> list[SettingRow]:
    """Every setting, group by group, for documentation."""
    return rows_of(Settings)
