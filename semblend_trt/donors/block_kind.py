"""Kinds of prompt text, the rules that tell them, and a reader that works beside serving.

The rules are plain and cheap; only eviction weights depend on them, never what is reused. Text that no rule knows is
OTHER.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from semblend_trt.background import Background
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.donors.eviction import Eviction

logger = logging.getLogger(__name__)


class BlockKind(str, Enum):
    """Kinds of prompt text. OTHER is text that no rule knows, and every donor before it has been read."""

    SYSTEM_PROMPT = "system_prompt"
    TEMPLATE = "template"
    RETRIEVED_CONTEXT = "retrieved_context"
    TOOL_OUTPUT = "tool_output"
    CODE = "code"
    LEGAL_EVIDENCE = "legal_evidence"
    ASSISTANT_HISTORY = "assistant_history"
    USER_QUERY = "user_query"
    OTHER = "other"


# The SemanticKV system's default weights. It has none for legal evidence, which is retrieved text as well.
DEFAULT_WEIGHTS: Mapping[BlockKind, float] = MappingProxyType(
    {
        BlockKind.SYSTEM_PROMPT: 2.4,
        BlockKind.TEMPLATE: 2.0,
        BlockKind.CODE: 1.6,
        BlockKind.RETRIEVED_CONTEXT: 1.4,
        BlockKind.LEGAL_EVIDENCE: 1.4,
        BlockKind.TOOL_OUTPUT: 1.1,
        BlockKind.ASSISTANT_HISTORY: 1.0,
        BlockKind.OTHER: 0.8,
        BlockKind.USER_QUERY: 0.7,
    }
)

KindMix = Mapping[BlockKind, float]
UNREAD: KindMix = MappingProxyType({BlockKind.OTHER: 1.0})


def main_kind(mix: KindMix) -> BlockKind:
    """The kind with the largest share, the first of them by the order of `BlockKind`."""
    return max(BlockKind, key=lambda kind: mix.get(kind, 0.0))


def mean_weight(mix: KindMix) -> float:
    """The default weights' mean over the shares of `mix`, which add up to 1."""
    return sum(share * DEFAULT_WEIGHTS[kind] for kind, share in mix.items())


# ChatML, Llama 3 and plain labels at the start of a line.
_TURN = re.compile(
    r"<\|im_start\|>(system|user|assistant|tool)\b|<\|start_header_id\|>(system|user|assistant|ipython)<\|end_header_id\|>"
    r"|^(System|User|Assistant|Tool|Human|Observation):",
    re.MULTILINE,
)
_BY_ROLE = {
    "system": BlockKind.SYSTEM_PROMPT,
    "assistant": BlockKind.ASSISTANT_HISTORY,
    "tool": BlockKind.TOOL_OUTPUT,
    "ipython": BlockKind.TOOL_OUTPUT,
    "observation": BlockKind.TOOL_OUTPUT,
}
_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_CODE_LINE = re.compile(
    r"^\s*(?:def |class |import |from \w+ import|#include|return\b|public |func |SELECT )|[;{}]\s*$"
)
_LEGAL = re.compile(
    r"§|\b(?:hereinafter|herein|pursuant to|plaintiff|defendant|affidavit|statute|whereas|Exhibit [A-Z\d]|v\. [A-Z])"
)
_TOOL = re.compile(r"^\s*(?:<tool_response>|\{\s*\"|\[\s*\{)")
_TEMPLATE = re.compile(
    r"\b(?:Answer (?:in|with|only)|Respond (?:in|with|only)|in the following format|Do not |You must |Use only)"
)
_RETRIEVED = re.compile(r"^\s*(?:Document|Passage|Source|Context|Title|\[\d+\])\b[^\n]{0,80}", re.IGNORECASE)
# A user's own words are short; a longer paragraph was put there from somewhere else.
_LONG_PARAGRAPH = 400


def kinds_of(text: str) -> KindMix:
    """The share of each kind in `text`, by characters; they add up to 1."""
    counts: dict[BlockKind, int] = {}
    for kind, length in _parts(text):
        if length:
            counts[kind] = counts.get(kind, 0) + length
    whole = sum(counts.values())
    return {kind: count / whole for kind, count in counts.items()} if whole else UNREAD


def _parts(text: str) -> Iterator[tuple[BlockKind, int]]:
    """Kind and length of one part after the other."""
    turns = list(_TURN.finditer(text))
    yield from _paragraphs(text[: turns[0].start() if turns else len(text)], is_turn=False)
    ends = [*(turn.start() for turn in turns[1:]), len(text)]
    for turn, end in zip(turns, ends, strict=False):
        role = next(group for group in turn.groups() if group is not None).lower()
        said = text[turn.end() : end]
        if role in _BY_ROLE:
            yield _BY_ROLE[role], len(said.strip())
        else:
            yield from _paragraphs(said, is_turn=True)


def _paragraphs(text: str, *, is_turn: bool) -> Iterator[tuple[BlockKind, int]]:
    """The kinds and lengths in a user's turn, or in text without turns."""
    for fence in _FENCE.findall(text):
        yield BlockKind.CODE, len(fence)
    for paragraph in re.split(r"\n\s*\n", _FENCE.sub("\n\n", text)):
        stripped = paragraph.strip()
        yield _kind_of_paragraph(stripped, is_turn=is_turn), len(stripped)


def _kind_of_paragraph(text: str, *, is_turn: bool) -> BlockKind:
    lines = text.splitlines()
    if _TOOL.match(text):
        return BlockKind.TOOL_OUTPUT
    if sum(_CODE_LINE.search(line) is not None for line in lines) * 2 > len(lines):
        return BlockKind.CODE
    if len(_LEGAL.findall(text)) >= 2:
        return BlockKind.LEGAL_EVIDENCE
    if _RETRIEVED.match(text):
        return BlockKind.RETRIEVED_CONTEXT
    if _TEMPLATE.search(text):
        return BlockKind.TEMPLATE
    if len(text) >= _LONG_PARAGRAPH:
        return BlockKind.RETRIEVED_CONTEXT
    return BlockKind.USER_QUERY if is_turn else BlockKind.OTHER


# More donors than this are not read, and keep the weight of OTHER.
MAX_WAITING = 64


class KindReader:
    """Reads donors' texts with the engine's tokenizer, off the serving path.

    `load` gives something with `decode(ids)`. It is called in the background, at the first donor. Where it fails,
    nothing is read, which is logged once.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._tokenizer: Any = None
        self._has_failed = False
        self._waiting: deque[tuple[str, npt.NDArray[np.int32]]] = deque()
        self._known: deque[tuple[str, KindMix]] = deque()
        self._thread = Background("semblend-kinds")

    def read(self, donor_id: str, tokens: npt.NDArray[np.int32]) -> None:
        """Begins to read a donor's text (int32 [n])."""
        if not self._has_failed and len(self._waiting) < MAX_WAITING:
            self._waiting.append((donor_id, tokens))
            self._thread.submit(self._read_next)

    def known(self) -> list[tuple[str, KindMix]]:
        """Returns and forgets the kinds that were found since the last call."""
        return [self._known.popleft() for _ in range(len(self._known))]

    def drain(self) -> None:
        """Waits until everything that was begun has been read."""
        self._thread.drain()

    def close(self) -> None:
        self._waiting.clear()
        self._thread.close(seconds=1.0)

    def _read_next(self) -> None:
        if not self._waiting or self._has_failed:
            return
        donor_id, tokens = self._waiting.popleft()
        try:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            self._known.append((donor_id, kinds_of(self._tokenizer.decode(tokens.tolist()))))
        except Exception:
            self._has_failed = True
            logger.warning("donors' texts cannot be read; eviction weighs all kinds alike", exc_info=True)


def kind_reader_for(eviction: Eviction, llm_args: Any) -> KindReader | None:
    """A reader where the policy weighs kinds; None where it does not."""
    return KindReader(lambda: _tokenizer_of(llm_args)) if eviction.reads_kinds else None


def _tokenizer_of(llm_args: Any) -> Any:
    """The engine's tokenizer, special tokens written out: an object that it was given, or one loaded from its files."""
    given = getattr(llm_args, "tokenizer", None)
    if hasattr(given, "decode"):
        return given
    return imported("AutoTokenizer").from_pretrained(str(given or llm_args.model))
