"""TraceLine: one request of a trace, a JSON line in the format of the SemanticKV system."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MAX_BLOCKS = 1 << 17
MAX_TOKENS = 1 << 28

Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Milliseconds = Annotated[float, Field(ge=0)]
Label = Annotated[str, Field(min_length=1, max_length=256)]


class BlockKind(str, Enum):
    """Kinds of prompt text. OTHER is text without a role that is known."""

    SYSTEM_PROMPT = "system_prompt"
    TEMPLATE = "template"
    RETRIEVED_CONTEXT = "retrieved_context"
    TOOL_OUTPUT = "tool_output"
    CODE = "code"
    LEGAL_EVIDENCE = "legal_evidence"
    ASSISTANT_HISTORY = "assistant_history"
    USER_QUERY = "user_query"
    OTHER = "other"


_BY_NAME = {each.value: each for each in BlockKind}
# The SemanticKV system writes the names of some roles for kinds.
_BY_NAME |= {
    "system": BlockKind.SYSTEM_PROMPT,
    "user": BlockKind.USER_QUERY,
    "assistant": BlockKind.ASSISTANT_HISTORY,
    "tool": BlockKind.TOOL_OUTPUT,
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TraceBlock(_Part):
    """A block of a prompt from token `position` on. Equal `content_hash`: the same tokens of the same tenant."""

    block_id: Label | None = None
    content_hash: Label | None = None
    semantic_type: Label = BlockKind.OTHER.value
    token_count: Tokens
    text: str | None = None
    position: Tokens | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def kind(self) -> BlockKind:
        """Return the block's kind; OTHER for an unknown name."""
        return _BY_NAME.get(self.semantic_type.lower(), BlockKind.OTHER)


class TraceLine(_Part):
    """One request: its blocks in the prompt's order, and what was observed of its answer.

    `timestamp_ms` is the arrival, since 1970. `observed_ttft_ms` is for streamed answers only: others come in one
    piece. `observed_prefix_hit_tokens` came from the replica's prefix cache; it computed `observed_prefill_tokens`."""

    request_id: Label
    timestamp_ms: Milliseconds
    session_id: Label | None = None
    tenant_id: Label | None = None
    model_name: Label | None = None
    blocks: Annotated[list[TraceBlock], Field(max_length=MAX_BLOCKS)]
    observed_ttft_ms: Milliseconds | None = None
    observed_total_latency_ms: Milliseconds | None = None
    observed_prefix_hit_tokens: Tokens | None = None
    observed_prefill_tokens: Tokens | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    def to_json(self) -> str:
        """Return the line without its newline; leave out unknown values."""
        return self.model_dump_json(exclude_none=True)
