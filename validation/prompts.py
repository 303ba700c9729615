"""The prompt format of the shipped model, and instructions and system prompts of differing lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INSTRUCTION_MARK = "<|inst|>"
DOCUMENT_MARK = "<|doc|>"
QUESTION_MARK = "<|q|>"
ANSWER_MARK = "<|a|>"
END_MARK = "<|end|>"
MARKS = (INSTRUCTION_MARK, DOCUMENT_MARK, QUESTION_MARK, ANSWER_MARK, END_MARK)

INSTRUCTIONS = (
    "Answer briefly.",
    "Use the documents.",
    "Answer the questions using the documents below.",
    "Read every document, then answer the question that follows.",
    "Reply with the exact value from the text and nothing else.",
    "The documents below come from several archives. Answer from them alone.",
    "You will see stock lists, notes on people and pages of old books. Answer with one word or one number.",
    "Look up what is asked for. If two lists describe the same place, the later list counts.",
    "A colleague has collected these papers for you. Read them with care, find the row or the sentence that the "
    "question is about, and copy the value from it.",
    "Answer the question at the end. Give only the value, without a unit, a sentence or an explanation. If the "
    "place is not mentioned anywhere in the documents, answer unknown.",
    "This is an audit of warehouses. Each list names a place in its first line and gives one item and one count in "
    "every row after it. Lists that come later replace earlier lists of the same place. State the count that holds "
    "now.",
    "You are given a bundle of documents in no particular order. Some are stock lists, some describe people by "
    "badge, city, trade and year of birth, and some are prose that has nothing to do with the question. Find the "
    "one that matters, read the value in it, and answer with that value. Do not guess, do not add words, and do not "
    "repeat the question.",
    "Before you answer, note how the papers are ordered: what stands further down was written later. When the same "
    "place appears twice, trust what was written later, whatever the earlier list said. When a place does not "
    "appear at all, say unknown. Names of places are always two words, and only the exact name counts, since many "
    "places have similar names. Counts are plain numbers between two and nine hundred and ninety-nine. Answer with "
    "the number alone.",
)

SYSTEM_PROMPTS = (
    "You are a careful clerk.",
    "You answer questions from the documents of this conversation. You keep answers short.",
    "You help the staff of a trading company. They show you documents one after another. Answer each question from "
    "what you have been shown so far.",
    "You are the assistant of the records office. Documents arrive during the conversation. A later stock list of a "
    "place replaces the earlier one. Answer with the value only.",
    "You are a reader of archives. Some documents are lists, some are notes on people, and some are pages of "
    "novels. Use only what stands in them. Answer with one word or one number. Say unknown if a place was never "
    "mentioned.",
    "You assist an auditor who checks the stock of many depots. The auditor pastes lists into the conversation and "
    "asks about them at once or much later. Remember every list. When a place is listed again, the new list counts "
    "from then on. Never explain how you found a value. If no list names the place, reply unknown.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished exchange: the documents shown in it, the question and the answer given."""

    question: str
    answer: str
    documents: tuple[str, ...] = ()


def render(instruction: str, documents: Sequence[str], question: str) -> str:
    """Return a prompt of one instruction, documents in order and a question; the answer follows.

    Raises ValueError if a part holds one of the format's own marks.
    """
    return _opening(instruction) + _documents(documents) + _question(question)


def render_conversation(system: str, turns: Sequence[Turn], question: str) -> str:
    """Return a prompt of finished turns and an open question.

    Raises ValueError if a part holds one of the format's own marks.
    """
    finished = "".join(
        _documents(turn.documents) + _question(turn.question) + _checked(turn.answer) + END_MARK for turn in turns
    )
    return _opening(system) + finished + _question(question)


def render_pages(instruction: str, pages: Sequence[str]) -> str:
    """Return a prompt of one instruction and documents, the last of which breaks off and is to be continued.

    Raises ValueError if a part holds one of the format's own marks.
    """
    return _opening(instruction) + _documents(pages)


def in_plain_text(text: str) -> str:
    """The prompt for models that were not trained on our marks: the same parts under plain headings."""
    for mark, heading in (
        (INSTRUCTION_MARK, ""),
        (DOCUMENT_MARK, "\n\n"),
        (QUESTION_MARK, "\n\nQuestion: "),
        (ANSWER_MARK, "\nAnswer: "),
        (END_MARK, "\n"),
    ):
        text = text.replace(mark, heading)
    return text


def _opening(instruction: str) -> str:
    return INSTRUCTION_MARK + _checked(instruction)


def _documents(documents: Sequence[str]) -> str:
    return "".join(DOCUMENT_MARK + _checked(document) for document in documents)


def _question(question: str) -> str:
    return QUESTION_MARK + _checked(question) + ANSWER_MARK


def _checked(part: str) -> str:
    for mark in (*MARKS, "<|endoftext|>"):
        if mark in part:
            raise ValueError(f"A prompt part must not hold the mark {mark}; it would change the prompt's structure.")
    return part
