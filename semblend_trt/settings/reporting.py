"""Settings of what is told of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from semblend_trt.settings.environment import SettingsGroup, Variable


class ReportingSettings(SettingsGroup):
    audit_path: Annotated[Path | None, Variable("AUDIT_PATH", "SEMBLEND_TRTLLM_AUDIT_PATH")] = Field(
        None, description="JSONL file to which audit events are appended; unset, none are written."
    )
    metrics: Annotated[bool, Variable("METRICS")] = Field(
        True, description="Counts in Prometheus' default registry, where prometheus_client is installed."
    )
