"""Settings of which requests become donors, and where their KV is held."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from semblend_trt.donors.eviction import Eviction
from semblend_trt.settings.environment import SettingsGroup, Variable


class DonorSettings(SettingsGroup):
    host_bytes: Annotated[int, Variable("HOST_BYTES")] = Field(
        4 << 30,
        ge=0,
        le=1 << 50,
        description=(
            "Host memory for donor KV, in bytes, page-locked at the start where there is a card; when it is full, "
            "donors go in the order of SEMBLEND_EVICTION."
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
    snapshot_bytes: Annotated[int, Variable("SNAPSHOT_BYTES")] = Field(
        1 << 30,
        ge=1 << 20,
        le=1 << 40,
        description="Device memory for copies of ended requests on their way to a tier, in bytes; taken only where the "
        "engine gives a request's blocks to others before it is saved (TensorRT-LLM up to 1.3). A donor is cut to what "
        "is free of it.",
    )
    disk_bytes: Annotated[int, Variable("DISK_BYTES")] = Field(
        0,
        ge=0,
        le=1 << 50,
        description="Files for donor KV, in bytes together; 0 writes none. Donors in host memory are written in the "
        "background, stay on disk when memory lets them go, and are found again after a restart.",
    )
    disk_path: Annotated[Path | None, Variable("DISK_PATH")] = Field(
        None,
        description="Folder for those files, of this engine alone; they hold token ids and KV, from which prompts can "
        "be recovered.",
    )
    disk_key_path: Annotated[Path | None, Variable("DISK_KEY_PATH")] = Field(
        None,
        description="File of the key with which those files are sealed, outside of their folder: 32 random bytes, mode "
        "600, made where there is none. Unset, it is `semblend-trt/donor-key` in `$XDG_STATE_HOME` or "
        "`~/.local/state`. Files of another key are not read.",
    )
    eviction: Annotated[Eviction, Variable("EVICTION")] = Field(
        Eviction.LRU,
        description="Which donors go first when a tier is full: the oldest; the least recently used; the least often "
        "used; large ones before small; by the kind of their text with fixed weights, or with weights that follow use.",
    )
    max_donors: Annotated[int, Variable("MAX_DONORS")] = Field(
        10_000, ge=1, le=10_000_000, description="Most donors held at once."
    )
    min_donor_tokens: Annotated[int, Variable("MIN_DONOR_TOKENS")] = Field(
        64, ge=1, le=1 << 20, description="A request with fewer tokens does not become a donor."
    )
