"""A trace: one JSON line for each request that a router placed, to be replayed through eviction policies.

The fields are those of the SemanticKV system's traces, so that either system's can be read. A router leaves text out
and writes keyed hashes for tenants, sessions and contents unless it is told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_LINE_BYTES = 16 << 20
MAX_BLOCKS = 1 << 17
MAX_TOKENS = 1 << 28

Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Milliseconds = Annotated[float, Field(ge=0)]
Label = Annotated[str, Field(min_length=1, max_length=256)]

# What the SemanticKV system calls kinds that have another name here.
_OTHER_NAMES = {
    "system": BlockKind.SYSTEM_PROMPT,
    "assistant": BlockKind.ASSISTANT_HISTORY,
    "user": BlockKind.USER_QUERY,
    "tool": BlockKind.TOOL_OUTPUT,
}


class TraceError(SemBlendError, ValueError):
    """A line of a trace cannot be read."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TraceBlock(_Part):
    """A piece of a prompt. Blocks of one `content_hash` hold the same tokens and belong to the same tenant.

    `position` is that of its first token in the prompt. `text` is there only where the router was told to keep it.
    """

    block_id: Label | None = None
    content_hash: Label | None = None
    semantic_type: Label = BlockKind.OTHER.value
    token_count: Tokens
    text: str | None = None
    position: Tokens | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def kind(self) -> BlockKind:
        """The block's kind; OTHER for a name that nobody knows."""
        name = self.semantic_type.lower()
        try:
            return _OTHER_NAMES.get(name) or BlockKind(name)
        except ValueError:
            return BlockKind.OTHER


class TraceLine(_Part):
    """One request: its blocks in the prompt's order, and what was observed of its answer.

    `timestamp_ms` is when the request came, since 1970. `observed_ttft_ms` is there for streamed answers only: of
    others the first byte comes with the last. `observed_prefix_hit_tokens` came from the replica's exact prefix cache,
    `observed_prefill_tokens` it computed, where it says so.
    """

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
        """The line, without its end; what is unknown is left out."""
        return self.model_dump_json(exclude_none=True)


def read_trace(
    lines: Iterable[str | bytes], on_bad_line: Callable[[TraceError], None] | None = None
) -> Iterator[TraceLine]:
    """Reads a trace, line by line; empty lines are passed over.

    A line that is not a request is told to `on_bad_line` and passed over as well. Without that, raises TraceError
    naming the line and what is wrong.
    """
    for number, line in enumerate(lines, 1):
        if len(line) <= MAX_LINE_BYTES and not line.strip():
            continue
        try:
            yield _read_line(line, number)
        except TraceError as error:
            if on_bad_line is None:
                raise
            on_bad_line(error)


def _read_line(line: str | bytes, number: int) -> TraceLine:
    if len(line) > MAX_LINE_BYTES:
        raise TraceError(f"line {number} has {len(line)} bytes; at most {MAX_LINE_BYTES} are read")
    try:
        return TraceLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise TraceError(f"line {number} is not a request, {place or 'the line'}: {first['msg']}") from None
