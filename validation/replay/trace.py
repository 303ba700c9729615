"""Traces: what a replay needs of requests, in the SemanticKV system's format or in Mooncake's."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import BaseModel, Field, StrictInt, ValidationError
from pydantic_core import from_json

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import bounded_lines, open_input, too_long

NONE = -1
MAX_TOKENS = 1 << 28
MAX_BLOCK_USES = 4_000_000
# The formats, and the key by which a line's is recognised.
SEMANTIC_KV, MOONCAKE = "semantic_kv", "mooncake"
_KEYS = {"blocks": SEMANTIC_KV, "hash_ids": MOONCAKE}
_MOONCAKE_BLOCK = 512

_Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Milliseconds = Annotated[float, Field(ge=0)]
_Label = Annotated[str, Field(min_length=1, max_length=256)]


class _Part(BaseModel, allow_inf_nan=False, protected_namespaces=()):
    """What is read of a line; it may have other fields."""


class TraceBlock(_Part):
    """A block of a prompt. Equal `content_hash`: the same tokens of the same tenant."""

    content_hash: _Label | None = None
    semantic_type: _Label = "other"
    token_count: _Tokens
    text: str | None = None


class TraceLine(_Part):
    """One request: its blocks in the prompt's order; `timestamp_ms` is the arrival, since 1970."""

    timestamp_ms: _Milliseconds
    tenant_id: _Label | None = None
    model_name: _Label | None = None
    blocks: list[TraceBlock]


class _MooncakeLine(_Part):
    timestamp: _Milliseconds
    input_length: _Tokens
    hash_ids: list[StrictInt]


class Skipped:
    """Lines that were passed over: their count for each reason, and the first of them. `bytes`: of all lines read."""

    def __init__(self) -> None:
        self.counts, self.first, self.bytes = Counter[str](), dict[str, int](), 0

    def add(self, line: int, reason: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, line)

    def sentence(self) -> str:
        """Return what was passed over; empty where nothing was."""
        each = ", ".join(f"{n:,} {why} (first in line {self.first[why]:,})" for why, n in self.counts.most_common())
        return f"Passed over: {each}." if each else ""


def readable_lines(file: BinaryIO, skipped: Skipped) -> Iterator[tuple[int, str]]:
    """Yield each line that is not blank, with its number; what is no text is `skipped`, which counts all bytes."""
    for number, (content, size) in enumerate(bounded_lines(file), 1):
        skipped.bytes += size
        if why := too_long(content):
            skipped.add(number, why)
            continue
        try:
            text = content.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            skipped.add(number, "not text in UTF-8")
        elif text:
            yield number, text


class Trace:
    """Requests in the order of their times, without texts and metadata, and the blocks that they share, by number.

    Each of `requests` is the prompt's tokens and its blocks, with NONE for a block that is not shared. Blocks differ by
    tenant, model, content and length. `parents`: the block before each one; NONE but in `prefixes`. `skipped`: lines
    that are no requests."""

    def __init__(self) -> None:
        self.form: str | None = None
        self.requests: list[tuple[int, array[int]]] = []
        self.tokens, self.parents, self.kinds = array("q"), array("q"), list[str]()
        self.skipped = Skipped()
        self._numbers: dict[Hashable, int] = {}

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(tokens for tokens, _ in self.requests)

    def number(self, name: Hashable, tokens: int, kind: str, parent: int = NONE) -> int:
        """Return the number of the block of this name, which keeps the kind of its first use."""
        found = self._numbers.setdefault(name, len(self.tokens))
        if found == len(self.tokens):
            self.tokens.append(tokens)
            self.parents.append(parent)
            self.kinds.append(kind)
        return found

    def prefixes(self) -> "Trace":
        """Return the same requests with blocks that also differ by all blocks before them."""
        found = Trace()
        for tokens, request in self.requests:
            parent, chain = NONE, array("q")
            for block in request:
                if block == NONE:
                    break
                parent = found.number((parent, block), self.tokens[block], self.kinds[block], parent)
                chain.append(parent)
            chain.extend([NONE] * (len(request) - len(chain)))
            found.requests.append((tokens, chain))
        return found


def trace_of(lines: Iterable[TraceLine], trace: Trace | None = None) -> Trace:
    """Return the trace of all lines, each with tokens. Raises ConfigurationError for none, and for too many blocks."""
    trace, uses = trace or Trace(), 0
    found: list[tuple[float, int, array[int]]] = []
    for line in lines:
        blocks = [block for block in line.blocks if block.token_count]
        uses += len(blocks)
        if uses > MAX_BLOCK_USES:
            why = f"the trace holds more than {MAX_BLOCK_USES} blocks; replay the first ones with --requests."
            raise ConfigurationError(why)
        numbers = array("q")
        for block in blocks:
            content = block.content_hash
            if content is None and block.text is not None:
                content = _digest(block.text).hex()
            name = _digest(repr((line.tenant_id, line.model_name, content, block.token_count)))
            numbers.append(NONE if content is None else trace.number(name, block.token_count, block.semantic_type))
        found.append((line.timestamp_ms, sum(block.token_count for block in blocks), numbers))
    trace.requests = [(tokens, numbers) for _, tokens, numbers in sorted(found, key=itemgetter(0))]
    if not found:
        why = f"the trace holds no request with tokens; there is nothing to replay. {trace.skipped.sentence()}"
        raise ConfigurationError(why.rstrip())
    return trace


def trace_file(path: Path, requests: int | None = None) -> Trace:
    """Read the first `requests` of a file of JSON lines, in the format of the first readable line; others are
    `skipped`. Raises ConfigurationError naming the file if nothing is left."""
    trace = Trace()
    try:
        with open_input(path, may_be_pipe=True) as file:
            return trace_of(islice(_requests(readable_lines(file, trace.skipped), trace), requests), trace)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


class UnreadError(Exception):
    """A line, or a prompt of it, that cannot be replayed; the message says why, without any of its text."""


def _requests(lines: Iterable[tuple[int, str]], trace: Trace) -> Iterator[TraceLine]:
    """Yield the requests of all lines that have the format of the first; sets the trace's format."""
    for number, text in lines:
        try:
            request, found = _read(text, trace.form)
            if not any(block.token_count for block in request.blocks):
                raise UnreadError("without tokens")
        except UnreadError as error:
            trace.skipped.add(number, str(error))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(each for each in first["loc"] if isinstance(each, str))
            trace.skipped.add(number, f"{place}: {first['msg']}" if place else first["msg"])
        else:
            trace.form = found
            yield request


def _read(text: str, form: str | None) -> tuple[TraceLine, str]:
    """Return the request and its format, which is `form` if that is given. Raises UnreadError and ValidationError."""
    try:
        values = from_json(text)
    except ValueError:
        raise UnreadError("not JSON") from None
    found = next((each for key, each in _KEYS.items() if key in values), None) if isinstance(values, dict) else None
    if found is None:
        raise UnreadError(f"without any of {', '.join(_KEYS)}")
    if form not in (None, found):
        raise UnreadError(f"of another format, {found}")
    if found == SEMANTIC_KV:
        return TraceLine.model_validate(values), found
    seen = _MooncakeLine.model_validate(values)
    # The last block may have fewer tokens, with an id or without.
    ids, tokens, size = seen.hash_ids, seen.input_length, _MOONCAKE_BLOCK
    if not (len(ids) - 1) * size < tokens < (len(ids) + 1) * size:
        raise UnreadError(f"with ids of blocks of {size} tokens that do not fit its length")
    blocks = [
        TraceBlock(content_hash=str(ids[at]) if at < len(ids) else None, token_count=min(size, tokens - at * size))
        for at in range(-(-tokens // size))
    ]
    return TraceLine(timestamp_ms=seen.timestamp, blocks=blocks), found


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
