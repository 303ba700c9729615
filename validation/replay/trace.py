"""Traces: what a replay needs of requests, in the SemanticKV system's format or in Mooncake's."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from pydantic_core import from_json

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import bounded_lines, open_input, too_long
from validation.replay.trace_line import MAX_BLOCKS, BlockKind, Milliseconds, Tokens, TraceBlock, TraceLine

NONE = -1


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

    def __len__(self) -> int:
        return len(self.tokens)


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
        told = ", ".join(f"{n:,} {why} (first in line {self.first[why]:,})" for why, n in self.counts.most_common())
        return f"Passed over: {told}." if told else ""


class TraceFormat(str, Enum):
    """Who publishes a trace."""

    SEMANTIC_KV = "semantic_kv"
    MOONCAKE = "mooncake"


# The key by which a line's format is recognised.
_KEYS = {"blocks": TraceFormat.SEMANTIC_KV, "hash_ids": TraceFormat.MOONCAKE}
MAX_REQUESTS = 1_000_000
MAX_BLOCK_USES = 4_000_000


class Trace:
    """Requests in the order of their times, without texts and metadata.

    Blocks of `spans` differ by tenant, model, content and length; those of `prefixes` also by all blocks before them,
    the last of which is their parent. A block without content_hash and text is not shared. `empty` counts requests
    without tokens, which are not replayed; `skipped` lines that are no requests."""

    def __init__(self) -> None:
        self.form = TraceFormat.SEMANTIC_KV
        self.spans, self.prefixes = Blocks(), Blocks()
        self.empty, self.skipped = 0, Skipped()
        self._span_uses, self._prefix_uses = array("q"), array("q")
        self._starts, self._prompt_tokens, self._seconds = array("q", [0]), array("q"), array("d")

    def add(self, line: TraceLine) -> None:
        """Add a request, without its empty blocks. Raises ConfigurationError if there are too many."""
        blocks = [block for block in line.blocks if block.token_count]
        if not blocks:
            self.empty += 1
            return
        if len(self) >= MAX_REQUESTS or len(self._span_uses) + len(blocks) > MAX_BLOCK_USES:
            raise ConfigurationError(
                f"the trace holds more than {MAX_REQUESTS} requests or {MAX_BLOCK_USES} blocks; replay the first ones "
                "with --requests."
            )
        parent, chain_holds = NONE, True
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
            self._span_uses.append(span)
            self._prefix_uses.append(parent if chain_holds else NONE)
        self._starts.append(len(self._span_uses))
        self._seconds.append(line.timestamp_ms / 1000.0)
        self._prompt_tokens.append(sum(block.token_count for block in blocks))

    def requests(self, *, as_prefixes: bool) -> Iterator[tuple[float, list[int]]]:
        """Yield the seconds since 1970 and the blocks, or NONE, of each request."""
        uses = self._prefix_uses if as_prefixes else self._span_uses
        for index in self._order():
            yield self._seconds[index], uses[self._starts[index] : self._starts[index + 1]].tolist()

    def prompt_tokens(self) -> list[int]:
        """Return the tokens of each request's prompt."""
        return [self._prompt_tokens[index] for index in self._order()]

    @property
    def block_uses(self) -> int:
        return len(self._span_uses)

    @property
    def held_prefix_blocks(self) -> int:
        """The uses of blocks that an unlimited prefix cache answers."""
        seen: set[int] = {NONE}
        held = 0
        for _, request in self.requests(as_prefixes=True):
            held += sum(block in seen and block != NONE for block in request)
            seen.update(request)
        return held

    def __len__(self) -> int:
        return len(self._seconds)

    def _order(self) -> list[int]:
        return sorted(range(len(self)), key=self._seconds.__getitem__)


def trace_of(lines: Iterable[TraceLine], trace: Trace | None = None) -> Trace:
    """Return the trace of all lines. Raises ConfigurationError when none of them has a token."""
    trace = Trace() if trace is None else trace
    for line in lines:
        trace.add(line)
    if not len(trace):
        told = f"the trace holds no request with tokens; there is nothing to replay. {trace.skipped.sentence()}"
        raise ConfigurationError(told.rstrip())
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


_MOONCAKE_BLOCK = 512


class _MooncakeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    timestamp: Milliseconds
    input_length: Tokens
    hash_ids: Annotated[list[StrictInt], Field(max_length=MAX_BLOCKS)]


def _read(text: bytes, form: TraceFormat | None) -> tuple[TraceLine, TraceFormat]:
    """Return the request and its format, which is `form` unless that is None. Raises UnreadError and ValidationError.
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
    seen = _MooncakeRequest.model_validate(values)
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
