"""TraceLine: one request of a trace, a JSON line in the format of the SemanticKV system."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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
    """A block of a prompt. Equal `content_hash`: the same tokens of the same tenant."""

    content_hash: Label | None = None
    semantic_type: Label = BlockKind.OTHER.value
    token_count: Tokens
    text: str | None = None

    @property
    def kind(self) -> BlockKind:
        """Return the block's kind; OTHER for an unknown name."""
        return _BY_NAME.get(self.semantic_type.lower(), BlockKind.OTHER)


class TraceLine(_Part):
    """One request: its blocks in the prompt's order; `timestamp_ms` is the arrival, since 1970."""

    request_id: Label
    timestamp_ms: Milliseconds
    tenant_id: Label | None = None
    model_name: Label | None = None
    blocks: Annotated[list[TraceBlock], Field(max_length=MAX_BLOCKS)]

    def to_json(self) -> str:
        """Return the line without its newline; leave out unknown values."""
        return self.model_dump_json(exclude_none=True)
