"""Traces: what a replay needs of requests, in the SemanticKV system's format or in Mooncake's."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from pydantic_core import from_json

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import bounded_lines, open_input, too_long

NONE = -1
MAX_BLOCKS = 1 << 17
MAX_TOKENS = 1 << 28
MAX_REQUESTS = 1_000_000
MAX_BLOCK_USES = 4_000_000
_MOONCAKE_BLOCK = 512

_Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Milliseconds = Annotated[float, Field(ge=0)]
_Label = Annotated[str, Field(min_length=1, max_length=256)]


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


# The SemanticKV system writes the names of some roles for kinds.
_KIND_BY_NAME = {each.value: each for each in BlockKind} | {
    "system": BlockKind.SYSTEM_PROMPT,
    "user": BlockKind.USER_QUERY,
    "assistant": BlockKind.ASSISTANT_HISTORY,
    "tool": BlockKind.TOOL_OUTPUT,
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TraceBlock(_Part):
    """A block of a prompt. Equal `content_hash`: the same tokens of the same tenant."""

    content_hash: _Label | None = None
    semantic_type: _Label = BlockKind.OTHER.value
    token_count: _Tokens
    text: str | None = None

    @property
    def kind(self) -> BlockKind:
        """Return the block's kind; OTHER for an unknown name."""
        return _KIND_BY_NAME.get(self.semantic_type.lower(), BlockKind.OTHER)


class TraceLine(_Part):
    """One request: its blocks in the prompt's order; `timestamp_ms` is the arrival, since 1970."""

    request_id: _Label
    timestamp_ms: _Milliseconds
    tenant_id: _Label | None = None
    model_name: _Label | None = None
    blocks: Annotated[list[TraceBlock], Field(max_length=MAX_BLOCKS)]


class _MooncakeLine(_Part):
    timestamp: _Milliseconds
    input_length: _Tokens
    hash_ids: Annotated[list[StrictInt], Field(max_length=MAX_BLOCKS)]


class Blocks:
    """`tokens`, `parents` and `kinds` of each block by number; NONE is the parent of a block without one."""

    def __init__(self) -> None:
        self.tokens, self.parents = array("q"), array("q")
        self.kinds: list[BlockKind] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, name: Hashable, tokens: int, kind: BlockKind, parent: int = NONE) -> int:
        """Return the number of the block of this name, which keeps the kind of its first use."""
        found = self._numbers.setdefault(name, len(self.tokens))
        if found == len(self.tokens):
            self.tokens.append(tokens)
            self.parents.append(parent)
            self.kinds.append(kind)
        return found


class Skipped:
    """Lines that were passed over: their count for each reason, and the first of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, int] = {}

    def add(self, line: int, reason: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, line)

    def sentence(self) -> str:
        """Return what was passed over; empty where nothing was."""
        each = ", ".join(f"{n:,} {why} (first in line {self.first[why]:,})" for why, n in self.counts.most_common())
        return f"Passed over: {each}." if each else ""


class TraceFormat(str, Enum):
    """Who publishes a trace."""

    SEMANTIC_KV = "semantic_kv"
    MOONCAKE = "mooncake"


# The key by which a line's format is recognised.
_KEYS = {"blocks": TraceFormat.SEMANTIC_KV, "hash_ids": TraceFormat.MOONCAKE}


class Trace:
    """Requests, without texts and metadata.

    Blocks of `spans` differ by tenant, model, content and length; those of `prefixes` also by all blocks before them,
    the last of which is their parent. A block without content_hash and text is not shared. `empty` counts requests
    without tokens, which are not replayed; `skipped` lines that are no requests."""

    def __init__(self) -> None:
        self.form = TraceFormat.SEMANTIC_KV
        self.spans, self.prefixes = Blocks(), Blocks()
        self.empty, self.skipped, self.block_uses = 0, Skipped(), 0
        # Of each: seconds, the prompt's tokens, and its blocks in `spans` and in `prefixes`.
        self._requests: list[tuple[float, int, array[int], array[int]]] = []

    def add(self, line: TraceLine) -> None:
        """Add a request, without its empty blocks. Raises ConfigurationError if there are too many."""
        blocks = [block for block in line.blocks if block.token_count]
        if not blocks:
            self.empty += 1
            return
        self.block_uses += len(blocks)
        if len(self) >= MAX_REQUESTS or self.block_uses > MAX_BLOCK_USES:
            raise ConfigurationError(
                f"the trace holds more than {MAX_REQUESTS} requests or {MAX_BLOCK_USES} blocks; replay the first ones "
                "with --requests."
            )
        spans, prefixes, parent, chain_holds = array("q"), array("q"), NONE, True
        for block in blocks:
            content = block.content_hash
            if content is None and block.text is not None:
                content = _digest(block.text).hex()
            span, chain_holds = NONE, chain_holds and content is not None
            if content is not None:
                name = (line.tenant_id, line.model_name, content, block.token_count)
                span = self.spans.number(_digest(repr(name)), block.token_count, block.kind)
            if chain_holds:
                parent = self.prefixes.number((parent, span), block.token_count, block.kind, parent)
            spans.append(span)
            prefixes.append(parent if chain_holds else NONE)
        tokens = sum(block.token_count for block in blocks)
        self._requests.append((line.timestamp_ms / 1000.0, tokens, spans, prefixes))

    def requests(self, *, as_prefixes: bool) -> Iterator[tuple[float, list[int], int]]:
        """Yield each request's seconds since 1970, its blocks, or NONE, and its tokens, in the order of the times."""
        self._requests.sort(key=itemgetter(0))
        for seconds, tokens, *numbered in self._requests:
            yield seconds, numbered[as_prefixes].tolist(), tokens

    @property
    def tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(tokens for _, tokens, *_ in self._requests)

    @property
    def held_prefix_blocks(self) -> int:
        """The uses of blocks that an unlimited prefix cache answers."""
        seen, held = {NONE}, 0
        for _, request, _ in self.requests(as_prefixes=True):
            held += sum(block in seen and block != NONE for block in request)
            seen.update(request)
        return held

    def __len__(self) -> int:
        return len(self._requests)


def trace_of(lines: Iterable[TraceLine], trace: Trace | None = None) -> Trace:
    """Return the trace of all lines. Raises ConfigurationError when none of them has a token."""
    trace = Trace() if trace is None else trace
    for line in lines:
        trace.add(line)
    if not len(trace):
        why = f"the trace holds no request with tokens; there is nothing to replay. {trace.skipped.sentence()}"
        raise ConfigurationError(why.rstrip())
    return trace


def trace_file(path: Path, requests: int | None = None) -> Trace:
    """Read the first `requests` of a file of JSON lines, in the format of the first readable line; others are
    `skipped`. Raises ConfigurationError naming the file if nothing is left."""
    trace = Trace()
    try:
        with open_input(path, may_be_pipe=True) as file:
            lines = (line for line, _ in bounded_lines(file))
            return trace_of(islice(_requests(lines, trace), requests), trace)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


class UnreadError(Exception):
    """A line, or a prompt of it, that cannot be replayed; the message says why, without any of its text."""


def _requests(lines: Iterable[bytes], trace: Trace) -> Iterator[TraceLine]:
    """Yield the requests of all lines that have the format of the first; sets the trace's format."""
    form: TraceFormat | None = None
    for number, line in enumerate(lines, 1):
        try:
            if why := too_long(line):
                raise UnreadError(why)
            if not (text := line.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            request, found = _read(text, form)
        except UnreadError as error:
            trace.skipped.add(number, str(error))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(each for each in first["loc"] if isinstance(each, str))
            trace.skipped.add(number, f"{place}: {first['msg']}" if place else first["msg"])
        else:
            form = trace.form = found
            yield request


def _read(text: bytes, form: TraceFormat | None) -> tuple[TraceLine, TraceFormat]:
    """Return the request and its format, which is `form` if that is given. Raises UnreadError and ValidationError.
    The last block of a Mooncake request may have fewer tokens, with an id or without."""
    try:
        values = from_json(text)
    except ValueError:
        raise UnreadError("not JSON") from None
    found = next((each for key, each in _KEYS.items() if key in values), None) if isinstance(values, dict) else None
    if found is None:
        raise UnreadError(f"without any of {', '.join(_KEYS)}")
    if form not in (None, found):
        raise UnreadError(f"of another format, {found.value}")
    if found is TraceFormat.SEMANTIC_KV:
        return TraceLine.model_validate(values), found
    seen = _MooncakeLine.model_validate(values)
    ids, tokens, size = seen.hash_ids, seen.input_length, _MOONCAKE_BLOCK
    if not (len(ids) - 1) * size < tokens < (len(ids) + 1) * size:
        raise UnreadError(f"with ids of blocks of {size} tokens that do not fit its length")
    blocks = [
        TraceBlock(content_hash=str(ids[at]) if at < len(ids) else None, token_count=min(size, tokens - at * size))
        for at in range(-(-tokens // size))
    ]
    return TraceLine(request_id="mooncake", timestamp_ms=seen.timestamp, blocks=blocks), found


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
