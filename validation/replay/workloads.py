"""Built-in traces: prompts of made-up blocks in the shapes that the SemanticKV system's workloads have."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.telemetry import TraceBlock, TraceLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    """A prompt is template, system prompt, documents in any order, the session's turns so far, tool outputs, question.

    Numbers with `tokens` in their names are tokens. Each prompt draws `documents_each` of `documents` by Zipf's law
    with the exponent `skew`; sessions have `turns` requests each. From the middle on, `shifts_to` takes the place of
    `kind`, and other documents that of the first. Tenants have the same texts and share nothing.
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
        content = hashlib.blake2b(f"{self._name}: {text}".encode(), digest_size=16).hexdigest()
        return TraceBlock(content_hash=content, semantic_type=kind.value, token_count=tokens)
