"""Settings of which requests become donors, and where their KV is held."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from semblend_trt.settings.environment import SettingsGroup, Variable


class DonorSettings(SettingsGroup):
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
