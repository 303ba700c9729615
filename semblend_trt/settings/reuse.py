"""Settings of what may be reused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from semblend_trt.policy import ReusePolicy, parse_policy
from semblend_trt.settings.environment import SettingsGroup, Variable


class ReuseSettings(SettingsGroup):
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
