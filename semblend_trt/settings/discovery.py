"""Settings of how donors are found and which runs of theirs make a plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from semblend_trt.settings.environment import SettingsGroup, Variable


class DiscoverySettings(SettingsGroup):
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
