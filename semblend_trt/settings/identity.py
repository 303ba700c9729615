"""Settings of what the engine's KV may be interchanged with: fields of its namespace."""

from __future__ import annotations

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
        None, min_length=1, max_length=256, description="Model revision; unset, a digest of the weights stands for it."
    )
    tokenizer_revision: Annotated[str | None, Variable("TOKENIZER_REVISION")] = Field(
        None, min_length=1, max_length=256, description="Tokenizer revision; unset, it is taken from the files."
    )
    adapter_id: Annotated[str | None, Variable("ADAPTER_ID")] = Field(
        None, min_length=1, max_length=256, description="Adapter that this engine applies to every request."
    )
