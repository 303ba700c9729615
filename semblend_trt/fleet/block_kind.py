"""Kinds of prompt text, and the rules that tell them: what telemetry writes of a block.

The rules are plain and cheap. Text that no rule knows is OTHER.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class BlockKind(str, Enum):
    """Kinds of prompt text. OTHER is text that no rule knows."""

    SYSTEM_PROMPT = "system_prompt"
    TEMPLATE = "template"
    RETRIEVED_CONTEXT = "retrieved_context"
    TOOL_OUTPUT = "tool_output"
    CODE = "code"
    LEGAL_EVIDENCE = "legal_evidence"
    ASSISTANT_HISTORY = "assistant_history"
    USER_QUERY = "user_query"
    OTHER = "other"


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


def kind_of(text: str) -> BlockKind:
    """The kind with most of the characters in `text`, the first of them by the order of `BlockKind`."""
    counts = Counter[BlockKind]()
    for kind, length in _parts(text):
        counts[kind] += length
    return max(BlockKind, key=counts.__getitem__) if counts.total() else BlockKind.OTHER


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
