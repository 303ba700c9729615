"""The prompt format of the shipped model, and the forms of prompts for others: marks, instructions and words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import ConfigurationError
from validation.documents import SHIPPED_VOCABULARY, WORDS, Vocabulary, words

if TYPE_CHECKING:
    from collections.abc import Sequence

INSTRUCTION_MARK = "<|inst|>"
DOCUMENT_MARK = "<|doc|>"
QUESTION_MARK = "<|q|>"
ANSWER_MARK = "<|a|>"
END_MARK = "<|end|>"
MARKS = (INSTRUCTION_MARK, DOCUMENT_MARK, QUESTION_MARK, ANSWER_MARK, END_MARK)

# Instructions and system prompts that the shipped model has learned, from a few words to a paragraph.
INSTRUCTIONS = tuple(WORDS["instructions"].splitlines())
SYSTEM_PROMPTS = tuple(WORDS["system prompts"].splitlines())


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished exchange; `documents` are shown in it."""

    question: str
    answer: str
    documents: tuple[str, ...] = ()


# These replace our marks for models that were not trained on them.
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
    """How a model is prompted. `rows`: least and most rows of a stock list that the model reads reliably.

    `qualified`: how a heading and a question name a place ("name") with one of the `units` or `dates` ("word").
    Without `has_marks`, plain headings replace the marks."""

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
        """Return a prompt without its answer. All renderers raise ValueError for a part that holds a mark."""
        return self.render_conversation(instruction, (), question, documents)

    def render_conversation(
        self, system: str, turns: Sequence[Turn], question: str, documents: Sequence[str] = ()
    ) -> str:
        """Return a prompt of finished turns, `documents` and an open question."""
        parts = [_marked(INSTRUCTION_MARK, system)]
        for turn in (*turns, Turn(question, "", tuple(documents))):
            parts += [_marked(DOCUMENT_MARK, *turn.documents), _marked(QUESTION_MARK, turn.question)]
            parts += [_marked(ANSWER_MARK, turn.answer), END_MARK]
        return self._put("".join(parts[:-1]))

    def render_pages(self, instruction: str, pages: Sequence[str]) -> str:
        """Return a prompt of one instruction and documents; the last breaks off and is to be continued."""
        return self._put(_marked(INSTRUCTION_MARK, instruction) + _marked(DOCUMENT_MARK, *pages))

    def _put(self, prompt: str) -> str:
        if not self.has_marks:
            for mark, heading in _HEADINGS.items():
                prompt = prompt.replace(mark, heading)
        return prompt


# Both small models know places of two words only, so a unit or a date takes the place of the first.
_UNITS = words("Box Crate Pair Dozen Bag Sack Pound Barrel")
_DATES = words("Spring Summer Autumn Winter")

SHIPPED = PromptForm(
    "shipped", INSTRUCTIONS, SYSTEM_PROMPTS, SHIPPED_VOCABULARY, (12, 18), _UNITS, _DATES, "{word} {name}"
)

render, render_conversation, render_pages = SHIPPED.render, SHIPPED.render_conversation, SHIPPED.render_pages

_YARDSTICK_INSTRUCTIONS = tuple(WORDS["yardstick instructions"].splitlines())
# This model was trained on lists of these words and lengths only; other words halve its exact match.
YARDSTICK = replace(
    SHIPPED,
    name="yardstick",
    instructions=_YARDSTICK_INSTRUCTIONS,
    system_prompts=_YARDSTICK_INSTRUCTIONS,
    vocabulary=Vocabulary(
        words(WORDS["yardstick place kinds"]),
        words(WORDS["yardstick place names"]),
        words(WORDS["yardstick items"]),
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
    """Return the form `name`; without one, what `tokenizer` knows, else PLAIN. Raises ConfigurationError."""
    if name is not None:
        if name not in FORMS:
            raise ConfigurationError(f"The prompt form {name!r} is unknown; use {', '.join(FORMS)}.")
        return FORMS[name]
    known = tokenizer.get_vocab()
    if any(mark not in known for mark in MARKS):
        return PLAIN
    # Both small models know the same marks; the shipped one knows 2,048 tokens.
    return SHIPPED if len(known) == 2_048 else YARDSTICK
