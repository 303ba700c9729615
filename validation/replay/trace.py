"""Traces: what a replay needs of requests, from telemetry, from a published trace or from a built-in workload."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from pydantic_core import from_json

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import MAX_LINE_BYTES, bounded_lines, open_input, too_long
from semblend_trt.fleet.block_kind import BlockKind
from semblend_trt.fleet.telemetry import MAX_BLOCKS, Label, Milliseconds, Tokens, TraceBlock, TraceLine

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Observation:
    """`ttft_ms` milliseconds for a prompt of `computed` and `reused` tokens, which were checked or not."""

    ttft_ms: float
    computed: int
    reused: int
    is_checked: bool = False

    @property
    def is_possible(self) -> bool:
        return 0.0 < self.ttft_ms < math.inf and self.computed >= 1 and self.reused >= 0

    @classmethod
    def of(cls, line: TraceLine) -> Observation | None:
        """None where the request tells too little, failed, or had its first token with its last.

        Prompt tokens that were not computed were reused; without their number, those of the exact prefix cache were.
        """
        ttft, computed = line.observed_ttft_ms, line.observed_prefill_tokens
        if (
            not ttft
            or not computed
            or ttft == line.observed_total_latency_ms
            or line.metadata.get("status", 200) != 200
        ):
            return None
        prompt = line.metadata.get("prompt_tokens")
        rest = prompt - computed if isinstance(prompt, int) else 0
        return cls(ttft, computed, max(rest, line.observed_prefix_hit_tokens or 0))


_KINDS = tuple(BlockKind)
NONE = -1


class Blocks:
    """`tokens` and `parents` of each block by number; NONE is the parent of a block without one."""

    def __init__(self) -> None:
        self.tokens, self.parents = array("q"), array("q")
        self._kinds = array("b")
        self._numbers: dict[Hashable, int] = {}

    def number(self, name: Hashable, tokens: int, kind: BlockKind, parent: int = NONE) -> int:
        """The number of the block of this name, which keeps the kind of its first use."""
        found = self._numbers.setdefault(name, len(self.tokens))
        if found == len(self.tokens):
            self.tokens.append(tokens)
            self.parents.append(parent)
            self._kinds.append(_KINDS.index(kind))
        return found

    def kind(self, block: int) -> BlockKind:
        return _KINDS[self._kinds[block]]

    def __len__(self) -> int:
        return len(self.tokens)


class Skipped:
    """Lines that were passed over: how many for each reason, and the first of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, int] = {}

    def add(self, line: int, reason: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, line)

    def sentence(self) -> str:
        """Empty where nothing was passed over."""
        told = ", ".join(f"{n:,} {why} (first in line {self.first[why]:,})" for why, n in self.counts.most_common())
        return f"Passed over: {told}." if told else ""


class TraceFormat(str, Enum):
    """Who publishes a trace. ROUTER: this package's router. CLAUDE_CODE: sessions of that agent, from WEKA.

    `told` says what of reuse the format does not tell; empty for ROUTER.
    """

    ROUTER = "router"
    MOONCAKE = "mooncake"
    CLAUDE_CODE = "claude_code"
    AZURE = "azure"

    @property
    def told(self) -> str:
        return _TOLD[self]


_PREFIXES = (
    "An id stands for all text up to the end of its block: what an exact prefix cache reuses is known, what reuse of "
    "moved text would add is not."
)
_TOLD = {
    TraceFormat.ROUTER: "",
    TraceFormat.MOONCAKE: _PREFIXES,
    TraceFormat.CLAUDE_CODE: f"{_PREFIXES} Ids hold within a session: what sessions share is not known either. Every "
    "session begins at second 0.",
    TraceFormat.AZURE: "The trace holds times and lengths alone: what its prompts share cannot be known, and counts as "
    "nothing.",
}

MAX_REQUESTS = 1_000_000
MAX_BLOCK_USES = 4_000_000


class Trace:
    """Requests in the order of their times, without texts and metadata.

    Blocks of `spans` differ by tenant, model, content and length; blocks of `prefixes` also by all blocks before them,
    the last of which is their parent. A block without content_hash and text is not shared. `empty` counts requests
    without tokens, which are not replayed; `skipped` lines that are no requests.
    """

    def __init__(self) -> None:
        self.form = TraceFormat.ROUTER
        self.spans, self.prefixes = Blocks(), Blocks()
        self.observations: list[Observation] = []
        self.empty, self.skipped = 0, Skipped()
        self._span_uses, self._prefix_uses = array("q"), array("q")
        self._starts, self._ends = array("q"), array("q")
        self._seconds = array("d")
        self._prompt_tokens = array("q")
        self._observed_tokens = self._counted_tokens = 0

    def add(self, line: TraceLine) -> None:
        """Adds a request, without its empty blocks. Raises ConfigurationError when there are too many."""
        blocks = [block for block in line.blocks if block.token_count]
        if not blocks:
            self.empty += 1
            return
        if len(self) >= MAX_REQUESTS or len(self._span_uses) + len(blocks) > MAX_BLOCK_USES:
            raise ConfigurationError(
                f"the trace holds more than {MAX_REQUESTS} requests or {MAX_BLOCK_USES} blocks; replay the first ones "
                "with --requests."
            )
        self._starts.append(len(self._span_uses))
        parent, chain_holds = NONE, True
        for block in blocks:
            content = _content(block)
            span, chain_holds = NONE, chain_holds and content is not None
            if content is not None:
                name = (line.tenant_id, line.model_name, content, block.token_count)
                span = self.spans.number(_digest(repr(name)), block.token_count, block.kind)
            if chain_holds:
                parent = self.prefixes.number((parent, span), block.token_count, block.kind, parent)
            self._span_uses.append(span)
            self._prefix_uses.append(parent if chain_holds else NONE)
        self._ends.append(len(self._span_uses))
        self._seconds.append(line.timestamp_ms / 1000.0)
        self._prompt_tokens.append(sum(block.token_count for block in blocks))
        observed = Observation.of(line)
        if observed is not None:
            self.observations.append(observed)
            self._observed_tokens += observed.computed + observed.reused
            self._counted_tokens += self._prompt_tokens[-1]

    def requests(self, *, as_prefixes: bool) -> Iterator[tuple[float, list[int]]]:
        """Seconds since 1970 and the blocks, or NONE, of each request."""
        uses = self._prefix_uses if as_prefixes else self._span_uses
        for index in self._order():
            yield self._seconds[index], uses[self._starts[index] : self._ends[index]].tolist()

    def prompt_tokens(self) -> list[int]:
        """Tokens of each request's prompt."""
        return [self._prompt_tokens[index] for index in self._order()]

    @property
    def observed_over_counted(self) -> float:
        """Tokens that engines counted over tokens of the blocks; 1 where none counted."""
        return self._observed_tokens / self._counted_tokens if self._counted_tokens else 1.0

    @property
    def block_uses(self) -> int:
        return len(self._span_uses)

    @property
    def seconds_from_to(self) -> tuple[float, float]:
        """When the first and the last request came."""
        return min(self._seconds), max(self._seconds)

    @property
    def held_prefix_blocks(self) -> int:
        """How many uses of blocks an unlimited prefix cache answers."""
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
    """The trace of all lines. Raises ConfigurationError when none of them has a token."""
    trace = Trace() if trace is None else trace
    for line in lines:
        trace.add(line)
    if not len(trace):
        told = f"the trace holds no request with tokens; there is nothing to replay. {trace.skipped.sentence()}"
        raise ConfigurationError(told.rstrip())
    return trace


def trace_file(path: Path, requests: int | None = None) -> Trace:
    """Reads the first `requests` of a file, or of a folder whose files `*.json` count as lines in the order of names.

    The first line that can be read tells the format; what cannot be read is counted in `skipped`. Raises
    ConfigurationError naming the file when nothing is left.
    """
    trace = Trace()
    try:
        return trace_of(islice(_requests(_content_lines(path), trace), requests), trace)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _content_lines(path: Path) -> Iterator[bytes]:
    """Lines, or whole files of a folder, cut right behind MAX_LINE_BYTES."""
    if path.is_dir():
        for each in sorted(path.glob("*.json")):
            with open_input(each) as file:
                yield file.read(MAX_LINE_BYTES + 1)
        return
    with open_input(path, may_be_pipe=True) as file:
        yield from (line for line, _ in bounded_lines(file))


class _UnreadError(Exception):
    """A line that is no request of the trace; the message says why, without any of its text."""


def _requests(lines: Iterable[bytes], trace: Trace) -> Iterator[TraceLine]:
    """The requests of all lines that have the format of the first; sets the trace's format."""
    form: TraceFormat | None = None
    for number, line in enumerate(lines, 1):
        try:
            if why := too_long(line):
                raise _UnreadError(why)
            if not (text := line.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            found, values = _recognised(text, form)
            if form not in (None, found):
                raise _UnreadError(f"of another format, {found.value}")
            read = _READERS[found](values) if values else []
        except _UnreadError as error:
            trace.skipped.add(number, str(error))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(each for each in first["loc"] if isinstance(each, str))
            trace.skipped.add(number, f"{place}: {first['msg']}" if place else first["msg"])
        else:
            form = trace.form = found
            yield from read


_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# The key by which a JSON line's format is told.
_KEYS = {
    "blocks": TraceFormat.ROUTER,
    "requests": TraceFormat.CLAUDE_CODE,
    "hash_ids": TraceFormat.MOONCAKE,
}


def _recognised(text: bytes, form: TraceFormat | None) -> tuple[TraceFormat, dict[str, Any]]:
    """A line's format and values, without values for the headings of a table. Raises _UnreadError."""
    if not text.startswith((b"{", b"[")):
        cells = text.decode("utf-8", "replace").split(",")
        if cells == list(_AZURE_COLUMNS):
            return TraceFormat.AZURE, {}
        if form is TraceFormat.AZURE and len(cells) == len(_AZURE_COLUMNS):
            return form, dict(zip(_AZURE_COLUMNS, cells, strict=True))
        raise _UnreadError("not JSON" if form is not TraceFormat.AZURE else f"not of {len(_AZURE_COLUMNS)} columns")
    try:
        values = from_json(text)
    except ValueError:
        raise _UnreadError("not JSON") from None
    found = next((each for key, each in _KEYS.items() if key in values), None) if isinstance(values, dict) else None
    if found is None:
        raise _UnreadError(f"without any of {', '.join(_KEYS)}")
    return found, values


class _Published(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, populate_by_name=True)


_HashIds = Annotated[list[StrictInt], Field(max_length=MAX_BLOCKS)]
_MOONCAKE_BLOCK = 512


class _MooncakeRequest(_Published):
    timestamp: Milliseconds
    input_length: Tokens
    hash_ids: _HashIds


class _SessionRequest(_Published):
    """A request of a session, or with `requests` the work of a subagent."""

    t: Annotated[float, Field(ge=0)]
    model: Label | None = None
    tokens: Annotated[Tokens, Field(alias="in")] = 0
    hash_ids: _HashIds = []
    requests: list[_SessionRequest] = []


class _PublishedSession(_Published):
    id: Label
    block_size: Annotated[int, Field(ge=1, le=1 << 20)]
    hash_id_scope: str = "local"
    requests: list[_SessionRequest]


class _AzureRequest(_Published):
    time: Annotated[datetime, Field(alias=_AZURE_COLUMNS[0])]
    tokens: Annotated[Tokens, Field(alias=_AZURE_COLUMNS[1])]


def _of_mooncake(values: dict[str, Any]) -> list[TraceLine]:
    seen = _MooncakeRequest.model_validate(values)
    blocks = _blocks(seen.hash_ids, seen.input_length, _MOONCAKE_BLOCK)
    return [TraceLine(request_id="mooncake", timestamp_ms=seen.timestamp, blocks=blocks)]


def _of_session(values: dict[str, Any]) -> list[TraceLine]:
    session = _PublishedSession.model_validate(values)
    return [
        TraceLine(
            request_id=session.id,
            timestamp_ms=1_000.0 * seconds,
            tenant_id=None if session.hash_id_scope == "global" else session.id,
            model_name=each.model,
            blocks=_blocks(each.hash_ids, each.tokens, session.block_size),
        )
        for seconds, each in _in_session(session.requests, 0.0)
    ]


def _in_session(requests: Iterable[_SessionRequest], began: float) -> Iterator[tuple[float, _SessionRequest]]:
    for each in requests:
        if each.requests:
            # Releases differ: a subagent's times count from its own begin, or from the session's.
            is_own = each.requests[0].t < each.t
            yield from _in_session(each.requests, began + each.t if is_own else began)
        else:
            yield began + each.t, each


def _of_azure(values: dict[str, Any]) -> list[TraceLine]:
    seen = _AzureRequest.model_validate(values)
    time = seen.time if seen.time.tzinfo else seen.time.replace(tzinfo=timezone.utc)
    block = TraceBlock(token_count=seen.tokens)
    return [TraceLine(request_id="azure", timestamp_ms=1e3 * time.timestamp(), blocks=[block])]


def _blocks(ids: Sequence[int], tokens: int, size: int) -> list[TraceBlock]:
    """Blocks of `size` tokens; the last may have fewer, with an id or without. Raises _UnreadError."""
    if not (len(ids) - 1) * size < tokens < (len(ids) + 1) * size:
        raise _UnreadError(f"with ids of blocks of {size} tokens that do not fit its length")
    lengths = [min(size, tokens - start) for start in range(0, tokens, size)]
    return [
        TraceBlock(content_hash=str(ids[at]) if at < len(ids) else None, token_count=length)
        for at, length in enumerate(lengths)
    ]


_READERS: dict[TraceFormat, Callable[[dict[str, Any]], list[TraceLine]]] = {
    TraceFormat.ROUTER: lambda values: [TraceLine.model_validate(values)],
    TraceFormat.MOONCAKE: _of_mooncake,
    TraceFormat.CLAUDE_CODE: _of_session,
    TraceFormat.AZURE: _of_azure,
}


def _content(block: TraceBlock) -> str | None:
    if block.content_hash is not None or block.text is None:
        return block.content_hash
    return _digest(block.text).hex()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


_LIVE_SESSIONS = 8
_MEAN_GAP_MS = 1_000.0
_CODE, _CONTEXT, _LEGAL, _TOOL = (
    BlockKind.CODE,
    BlockKind.RETRIEVED_CONTEXT,
    BlockKind.LEGAL_EVIDENCE,
    BlockKind.TOOL_OUTPUT,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A built-in trace. A prompt is template, system prompt, documents in any order, the session's turns so far, tool
    outputs, question.

    Each prompt draws `documents_each` of `documents` by Zipf's law with the exponent `skew`; sessions have `turns`
    requests each. In the second half, documents are others, of the kind `shifts_to`. Tenants have the same texts and
    share nothing.
    """

    system_prompts: int = 1
    system_tokens: int = 300
    template_tokens: int = 0
    documents: int = 0
    documents_each: int = 0
    document_tokens: tuple[int, int] = (400, 800)
    kind: BlockKind = _CONTEXT
    skew: float = 1.0
    turns: int = 1
    tool_outputs: int = 0
    tenants: int = 1
    shifts_to: BlockKind | None = None


WORKLOADS = {
    "repeated_system": Workload(system_prompts=12, system_tokens=900),
    "rag_shared_corpus": Workload(documents=64, documents_each=4, tenants=2),
    "support_agent": Workload(documents=40, documents_each=2, document_tokens=(200, 400), template_tokens=300, turns=6),
    "coding_assistant": Workload(
        documents=50, documents_each=3, document_tokens=(500, 1_500), kind=_CODE, system_tokens=600, turns=8
    ),
    "legal_evidence": Workload(documents=32, documents_each=3, document_tokens=(1_000, 2_500), kind=_LEGAL, skew=0.7),
    "tool_using_agent": Workload(system_tokens=500, template_tokens=1_200, turns=10, tool_outputs=2),
    "low_memory_rag_stress": Workload(documents=256, documents_each=5, skew=0.8),
    "shared_system_prompt_high_reuse": Workload(system_tokens=3_000, template_tokens=600, turns=2),
    "tool_agent_session_reuse": Workload(
        documents=30, documents_each=1, kind=_TOOL, template_tokens=900, turns=20, tool_outputs=1
    ),
    "legal_review_long_context": Workload(
        documents=24, documents_each=4, document_tokens=(4_000, 8_000), kind=_LEGAL, skew=0.5, turns=3
    ),
    "workload_shift_static_vs_adaptive": Workload(documents=80, documents_each=4, kind=_CODE, shifts_to=_TOOL),
}


@dataclass(slots=True)
class _Session:
    name: str
    tenant: int
    system: int
    turns_left: int
    history: list[TraceBlock] = field(default_factory=list)


def workload_lines(name: str, requests: int, seed: int) -> Iterator[TraceLine]:
    """`requests` lines of a workload; equal seeds give equal lines. Raises ConfigurationError for an unknown name."""
    if name not in WORKLOADS:
        raise ConfigurationError(f"--workload names {name!r}; there are {', '.join(WORKLOADS)}.")
    return _Writer(name, np.random.default_rng([seed, list(WORKLOADS).index(name)])).lines(requests)


class _Writer:
    def __init__(self, name: str, random: np.random.Generator) -> None:
        self._name, self._random, self._workload = name, random, WORKLOADS[name]
        weights = np.arange(1, self._workload.documents + 1) ** -self._workload.skew
        self._shares = weights / weights.sum()
        low, high = self._workload.document_tokens
        self._document_tokens = random.integers(low, high, max(1, self._workload.documents), endpoint=True)
        self._sessions = 0
        self._milliseconds = 0.0

    def lines(self, requests: int) -> Iterator[TraceLine]:
        live: list[_Session] = []
        for index in range(requests):
            if len(live) < _LIVE_SESSIONS:
                live.append(self._session())
            session = live[self._random.integers(len(live))]
            question = self._turn(session, index, BlockKind.USER_QUERY, 30, 120)
            tools = [
                self._turn(session, index, _TOOL, 150, 500, number) for number in range(self._workload.tool_outputs)
            ]
            documents = self._documents(is_late=2 * index >= requests)
            yield self._line(index, session, [*documents, *session.history, *tools, question])
            session.history += [*tools, question, self._turn(session, index, BlockKind.ASSISTANT_HISTORY, 80, 300)]
            session.turns_left -= 1
            if not session.turns_left:
                live.remove(session)

    def _line(self, index: int, session: _Session, rest: Sequence[TraceBlock]) -> TraceLine:
        workload = self._workload
        head = [self._block(f"system {session.system}", BlockKind.SYSTEM_PROMPT, workload.system_tokens)]
        if workload.template_tokens:
            head.insert(0, self._block("template", BlockKind.TEMPLATE, workload.template_tokens))
        self._milliseconds += float(self._random.exponential(_MEAN_GAP_MS))
        return TraceLine(
            request_id=f"{self._name}-{index}",
            timestamp_ms=self._milliseconds,
            session_id=session.name,
            tenant_id=f"tenant-{session.tenant}",
            model_name="model",
            blocks=[*head, *rest],
        )

    def _session(self) -> _Session:
        self._sessions += 1
        return _Session(
            name=f"session-{self._sessions}",
            tenant=int(self._random.integers(self._workload.tenants)),
            system=int(self._random.integers(self._workload.system_prompts)),
            turns_left=self._workload.turns,
        )

    def _documents(self, *, is_late: bool) -> list[TraceBlock]:
        workload = self._workload
        if not workload.documents_each:
            return []
        shift = workload.shifts_to if is_late else None
        drawn = self._random.choice(workload.documents, workload.documents_each, replace=False, p=self._shares)
        return [
            self._block(f"document {number} {shift}", shift or workload.kind, int(self._document_tokens[number]))
            for number in drawn
        ]

    def _turn(self, session: _Session, index: int, kind: BlockKind, low: int, high: int, number: int = 0) -> TraceBlock:
        return self._block(
            f"{kind.value} {session.name} {index} {number}", kind, int(self._random.integers(low, high, endpoint=True))
        )

    def _block(self, text: str, kind: BlockKind, tokens: int) -> TraceBlock:
        content = _digest(f"{self._name}: {text}").hex()
        return TraceBlock(content_hash=content, semantic_type=kind.value, token_count=tokens)
