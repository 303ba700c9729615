"""The prompt format of the shipped model, and the forms in which models are prompted: marks, instructions and words."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import ConfigurationError
from validation.documents import SHIPPED_VOCABULARY, Vocabulary, words

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


# What models that were not trained on our marks are shown in their place.
_HEADINGS = {
    INSTRUCTION_MARK: "",
    DOCUMENT_MARK: "\n\n",
    QUESTION_MARK: "\n\nQuestion: ",
    ANSWER_MARK: "\nAnswer: ",
    END_MARK: "\n",
}


def _marked(mark: str, *parts: str) -> str:
    for part in parts:
        for each in (*MARKS, "<|endoftext|>"):
            if each in part:
                raise ValueError(
                    f"A prompt part must not hold the mark {each}; it would change the prompt's structure."
                )
    return "".join(mark + part for part in parts)


@dataclass(frozen=True, slots=True)
class PromptForm:
    """`rows`: least and most rows of a stock list that the model reads reliably.

    `instructions` and `system_prompts` differ in length. `qualified`: how a heading and a question name a list of a
    place ("name") in one of the `units` or on one of the `dates` ("word"). Without `has_marks`, the marks are replaced
    by plain headings.
    """

    name: str
    instructions: tuple[str, ...]
    system_prompts: tuple[str, ...]
    vocabulary: Vocabulary
    rows: tuple[int, int]
    units: tuple[str, ...]
    dates: tuple[str, ...]
    qualified: str
    has_marks: bool = True

    def render(self, instruction: str, documents: Sequence[str], question: str) -> str:
        """A prompt of one instruction, documents in order and a question; the answer follows.

        Raises ValueError, as the others here do, if a part holds one of the format's own marks.
        """
        return self.render_conversation(instruction, (), question, documents)

    def render_conversation(
        self, system: str, turns: Sequence[Turn], question: str, documents: Sequence[str] = ()
    ) -> str:
        """A prompt of finished turns, `documents` and an open question."""
        parts = [_marked(INSTRUCTION_MARK, system)]
        for turn in (*turns, Turn(question, "", tuple(documents))):
            parts += [_marked(DOCUMENT_MARK, *turn.documents), _marked(QUESTION_MARK, turn.question)]
            parts += [_marked(ANSWER_MARK, turn.answer), END_MARK]
        return self._put("".join(parts[:-1]))

    def render_pages(self, instruction: str, pages: Sequence[str]) -> str:
        """A prompt of one instruction and documents, the last of which breaks off and is to be continued."""
        return self._put(_marked(INSTRUCTION_MARK, instruction) + _marked(DOCUMENT_MARK, *pages))

    def _put(self, prompt: str) -> str:
        if self.has_marks:
            return prompt
        return re.sub("|".join(map(re.escape, MARKS)), lambda mark: _HEADINGS[mark[0]], prompt)


# Both small models know places of two words only, so a unit or a date takes the place of the first.
_UNITS = words("Box Crate Pair Dozen Bag Sack Pound Barrel")
_DATES = words("Spring Summer Autumn Winter")

SHIPPED = PromptForm(
    "shipped", INSTRUCTIONS, SYSTEM_PROMPTS, SHIPPED_VOCABULARY, (12, 18), _UNITS, _DATES, "{word} {name}"
)

render, render_conversation, render_pages = SHIPPED.render, SHIPPED.render_conversation, SHIPPED.render_pages

_YARDSTICK_INSTRUCTIONS = (
    "Answer the questions using the documents below.",
    "Please study these passages and answer what is asked.",
    "Here is the context. After it come questions; answer briefly.",
    "You are given several documents. Use them to answer.",
    "As an assistant, consult the passages and answer in a few words.",
    "Read the documents carefully, then answer each question.",
    "Use only the following passages to respond.",
    "Below are some documents. Reply to the questions with words from the documents.",
    "The documents that follow hold the answers to the questions at the end.",
    "Context documents follow. Give short answers.",
)
# This model was trained on lists of these words and lengths only; other words halve its exact match.
YARDSTICK = replace(
    SHIPPED,
    name="yardstick",
    instructions=_YARDSTICK_INSTRUCTIONS,
    system_prompts=_YARDSTICK_INSTRUCTIONS,
    vocabulary=Vocabulary(
        words("Depot Vault Shed Plant Store Warehouse Yard Branch Annex Hangar Outlet Office Kiosk Dock Cellar"),
        words(
            "Split Turku Pune Hanoi Turin Delhi Ghent Quito Bern Reno Porto Leeds Kazan Kyoto Sofia Lima Boise Dakar "
            "Malmo Salem Tulsa Vigo Basel Tunis Omsk Osaka Omaha Perth Riga Essex Izmir Accra Cairo Oslo Derby Tampa "
            "Lyon Graz Miami Minsk"
        ),
        words(
            "nails tents drills boots flags bolts kites screws gloves clocks maps coats bricks keys chairs carts "
            "phones vans boats screens bells lamps tiles books pipes drums tablets hats saws cables locks scarves "
            "axes belts hinges pumps radios ropes rings desks"
        ),
        least=5,
    ),
    rows=(8, 9),
)
PLAIN = replace(
    SHIPPED,
    name="plain",
    units=words("boxes crates pairs dozens bags sacks pounds barrels"),
    dates=words("January February March April May June July August September October November December"),
    qualified="{name} in {word}",
    has_marks=False,
)
FORMS = {form.name: form for form in (SHIPPED, YARDSTICK, PLAIN)}


def form_for(tokenizer: Any, name: str | None = None) -> PromptForm:
    """The form called `name`; without a name, the one whose marks `tokenizer` (of Transformers) knows, else PLAIN.

    Raises ConfigurationError for an unknown name.
    """
    if name is not None:
        if name not in FORMS:
            raise ConfigurationError(f"The prompt form {name!r} is unknown; use {', '.join(FORMS)}.")
        return FORMS[name]
    known = tokenizer.get_vocab()
    if any(mark not in known for mark in MARKS):
        return PLAIN
    # Both small models know the same marks; the shipped one knows 2,048 tokens.
    return SHIPPED if len(known) == 2_048 else YARDSTICK
