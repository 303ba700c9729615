"""Traces: one JSON line for each request that a router placed. Eviction policies can be replayed on them.

The fields are those of the SemanticKV system's traces, so that readers can read both. Tenants, sessions and contents
are keyed hashes; text is left out unless the configuration asks for it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from semblend_trt.background import Background
from semblend_trt.errors import ConfigurationError
from semblend_trt.outcome import RECEIPT
from semblend_trt.prompts import completion_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from semblend_trt.fleet.router.config import Caller, TelemetryConfig
    from semblend_trt.fleet.router.counters import RouterCounters
    from semblend_trt.fleet.router.replicas import Observed
    from semblend_trt.prompts import PromptReader

logger = logging.getLogger(__name__)

MAX_BLOCKS = 1 << 17
MAX_TOKENS = 1 << 28
# Most bytes of bodies that wait to be written; the log drops and counts further lines.
MAX_WAITING_BYTES = 64 << 20
CLOSE_SECONDS = 5.0

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


# A router knows the kind of a text by its role alone; other writers of traces name the other kinds.
_BY_ROLE = {
    **dict.fromkeys(("system", "developer"), BlockKind.SYSTEM_PROMPT),
    "user": BlockKind.USER_QUERY,
    "assistant": BlockKind.ASSISTANT_HISTORY,
    **dict.fromkeys(("tool", "function", "ipython", "observation"), BlockKind.TOOL_OUTPUT),
}
# The SemanticKV system writes the names of some roles for kinds.
_BY_NAME = {each.value: each for each in BlockKind}
_BY_NAME |= {role: _BY_ROLE[role] for role in ("system", "user", "assistant", "tool")}
# A paragraph keeps the empty lines after it, so that paragraphs add up to the text.
_PARAGRAPH = re.compile(r".+?(?:\n\s*\n|\Z)", re.DOTALL)


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


class Hasher:
    """Keyed hashes of 32 hex digits: equal for equal contents of one tenant, and useless without the key."""

    def __init__(self, secret: bytes) -> None:
        """Derive the key from the router's secret; it reveals nothing of the salts derived from it."""
        self._key = hashlib.blake2b(key=secret[:64], person=b"semblend-trace1", digest_size=32).digest()

    def of_text(self, tenant: str | None, text: str) -> str:
        return self._hash(tenant, b"text", text.encode("utf-8", "surrogatepass"))

    def of_tokens(self, tenant: str | None, token_ids: list[int]) -> str:
        try:
            data = np.array(token_ids, dtype="<i8").tobytes()
        except OverflowError:  # no engine has such ids
            data = repr(token_ids).encode()
        return self._hash(tenant, b"tokens", data)

    def _hash(self, tenant: str | None, what: bytes, data: bytes) -> str:
        whose = b"" if tenant is None else b"\1" + tenant.encode()
        message = len(whose).to_bytes(4, "little") + whose + what + b"\0" + data
        return hashlib.blake2b(message, key=self._key, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class BlockMaker:
    """Cuts prompts into blocks of at most `block_tokens` tokens; no block crosses the end of a paragraph.
    Each paragraph is tokenised alone, without a chat template. A prompt of token ids is one paragraph."""

    prompts: PromptReader
    hasher: Hasher
    block_tokens: int
    keep_text: bool

    def blocks(self, body: Mapping[str, Any], tenant: str | None) -> list[TraceBlock]:
        """Return the first MAX_BLOCKS blocks of a body's prompt. Raise PromptError."""
        return list(islice(self._blocks(body, tenant), MAX_BLOCKS))

    def _blocks(self, body: Mapping[str, Any], tenant: str | None) -> Iterator[TraceBlock]:
        position = 0
        for kind, token_ids in self._paragraphs(body):
            for start in range(0, len(token_ids), self.block_tokens):
                run = token_ids[start : start + self.block_tokens]
                yield TraceBlock(
                    content_hash=self.hasher.of_tokens(tenant, run),
                    semantic_type=kind.value,
                    token_count=len(run),
                    text=self._text(run) if self.keep_text else None,
                    position=position,
                )
                position += len(run)

    def _text(self, token_ids: list[int]) -> str | None:
        try:
            return self.prompts.text(token_ids)
        except Exception:  # ids outside of the vocabulary may have no text
            return None

    def _paragraphs(self, body: Mapping[str, Any]) -> Iterator[tuple[BlockKind, list[int]]]:
        if "messages" not in body and not isinstance(prompt := completion_prompt(body), str):
            yield BlockKind.OTHER, prompt
            return
        for role, text in self.prompts.texts(body):
            for paragraph in _PARAGRAPH.findall(text):
                yield _BY_ROLE.get(role or "", BlockKind.OTHER), self.prompts.token_ids(paragraph)


@dataclass(frozen=True, slots=True, eq=False)
class ServedRequest:
    """A request that has ended, and what was observed of it."""

    request_id: str
    timestamp_ms: int
    model: str
    caller: Caller
    body: Mapping[str, Any]
    body_bytes: int
    observed: Observed
    metadata: dict[str, JsonValue]


class TraceLog:
    """Writes a line per request, on its own thread, which alone uses `prompts`.
    One event loop calls `note` and `close`. Raises ConfigurationError when the file cannot be opened."""

    def __init__(
        self, config: TelemetryConfig, hasher: Hasher, prompts: PromptReader, counters: RouterCounters
    ) -> None:
        self._hasher, self._counters = hasher, counters
        self._maker = BlockMaker(prompts, hasher, config.block_tokens, config.text == "kept")
        try:
            # With a symlink, its target is rotated. A pipe or device is never rotated.
            target = os.path.realpath(config.path)
            self._file = _TraceFile(target, maxBytes=config.max_bytes, backupCount=config.files, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"telemetry.path {config.path} cannot be written: {error.strerror}") from None
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread = Background("semblend-trace")

    def note(self, served: ServedRequest) -> None:
        """Queue a line, without waiting."""
        with self._lock:
            is_full = self._waiting_bytes + served.body_bytes > MAX_WAITING_BYTES
            if not is_full:
                self._waiting_bytes += served.body_bytes
        if is_full:
            self._counters.trace_lines.labels("dropped").inc()
        else:
            self._thread.submit(lambda: self._write(served))

    def close(self) -> None:
        """Write the waiting lines, for CLOSE_SECONDS at most."""
        self._thread.close(CLOSE_SECONDS)
        self._file.close()

    def _write(self, served: ServedRequest) -> None:
        result = "failed"
        try:
            self._file.emit(logging.makeLogRecord({"msg": self._line(served).to_json()}))
            result = "written"
        except OSError as error:
            logger.warning("a trace line cannot be written: %s", error)
        finally:
            with self._lock:
                self._waiting_bytes -= served.body_bytes
            self._counters.trace_lines.labels(result).inc()

    def _line(self, served: ServedRequest) -> TraceLine:
        caller, observed = served.caller, served.observed
        usage = usage_in(observed.tail)
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        cached, computed = _tokens(details.get("cached_tokens")), _tokens(details.get("computed_tokens"))
        prompt_tokens = _tokens(usage.get("prompt_tokens"))
        if computed is None and prompt_tokens is not None and cached is not None:
            computed = max(0, prompt_tokens - cached)
        metadata: dict[str, JsonValue] = {
            **served.metadata,
            "status": observed.status,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": _tokens(usage.get("completion_tokens")),
            "reused_tokens": _tokens(details.get("reused_tokens")),
        }
        try:
            blocks = self._maker.blocks(served.body, caller.tenant)
        except Exception:  # a prompt that cannot be read has no blocks
            blocks = []
        return TraceLine(
            request_id=served.request_id,
            timestamp_ms=served.timestamp_ms,
            session_id=None if caller.session is None else self._hasher.of_text(caller.tenant, caller.session),
            tenant_id=None if caller.tenant is None else self._hasher.of_text(None, caller.tenant),
            model_name=served.model,
            blocks=blocks,
            observed_ttft_ms=_milliseconds(observed.first_byte_seconds),
            observed_total_latency_ms=_milliseconds(observed.seconds),
            observed_prefix_hit_tokens=cached,
            observed_prefill_tokens=computed,
            metadata={name: value for name, value in metadata.items() if value is not None},
        )


class _TraceFile(RotatingFileHandler):
    """Raises the file's exceptions; a log handler would print them to standard error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - the base class names it
        raise


def usage_in(tail: bytes) -> dict[str, Any]:
    """Return the usage in an answer or at the end of a stream; empty where it is missing."""
    lines = [line.removeprefix(b"data:") for line in tail.splitlines() if b'"usage"' in line]
    for text in (tail, *reversed(lines)):
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            continue
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(usage, dict):
            return usage
    return {}


def receipt_in(tail: bytes) -> dict[str, Any]:
    """Return the receipt in the usage of an answer; empty where it is missing."""
    receipt = usage_in(tail).get(RECEIPT)
    return receipt if isinstance(receipt, dict) else {}


def _tokens(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_TOKENS else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
