"""Settings of what the engine's KV may be interchanged with: fields of its namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from semblend_trt.settings.environment import SettingsGroup, Variable


class IdentitySettings(SettingsGroup):
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
        None,
        min_length=1,
        max_length=256,
        description="Model revision; unset, a digest of every byte of the weights stands for it, under whatever name.",
    )
    digest_cache_path: Annotated[Path | None, Variable("DIGEST_CACHE")] = Field(
        None,
        description="Folder, of this user alone, in which digests of weights are kept for the next start; unset, "
        "`semblend-trt` in $XDG_CACHE_HOME or ~/.cache; off keeps none.",
    )
    tokenizer_revision: Annotated[str | None, Variable("TOKENIZER_REVISION")] = Field(
        None,
        min_length=1,
        max_length=256,
        description="Tokenizer revision; unset, a digest of its files stands for it.",
    )
    adapter_id: Annotated[str | None, Variable("ADAPTER_ID")] = Field(
        None, min_length=1, max_length=256, description="Adapter that this engine applies to every request."
    )
