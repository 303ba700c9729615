"""The prompt format of the shipped model, and the forms of prompts for others: marks, instructions and words."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from semblend_trt.errors import ConfigurationError
from semblend_trt.prompts import ChatError, render_chat
from validation.documents import SHIPPED_VOCABULARY, WORDS, Vocabulary, words

INSTRUCTION_MARK = "<|inst|>"
DOCUMENT_MARK = "<|doc|>"
QUESTION_MARK = "<|q|>"
ANSWER_MARK = "<|a|>"
END_MARK = "<|end|>"
MARKS = (INSTRUCTION_MARK, DOCUMENT_MARK, QUESTION_MARK, ANSWER_MARK, END_MARK)
Texts = Sequence[str]

# Instructions and system prompts that the shipped model has learned, from a few words to a paragraph.
INSTRUCTIONS = tuple(WORDS["instructions"].splitlines())
SYSTEM_PROMPTS = tuple(WORDS["system prompts"].splitlines())


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished exchange; `documents` are shown in it."""

    question: str
    answer: str
    documents: tuple[str, ...] = ()


# These replace our marks, in their order, for models that were not trained on them.
_HEADINGS = ("", "\n\n", "\n\nQuestion: ", "\nAnswer: ", "\n")


def _marked(mark: str, *parts: str) -> str:
    for each in (*MARKS, "<|endoftext|>"):
        if any(each in part for part in parts):
            raise ValueError(f"A prompt part must not hold the mark {each}; it would change the prompt's structure.")
    return "".join(mark + part for part in parts)


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How a model is prompted. `rows`: least and most rows of a stock list that the model reads reliably.

    `qualified`: how a heading and a question name a place ("name") with one of the `units` or `dates` ("word").
    Without `has_marks`, plain headings replace the marks. `template_digest`: SHA-256 of the chat template, in hex.
    `head`: the special token that a chat's prompts begin with, or "". `end_id`: the one after an assistant's turn."""

    name: str
    instructions: tuple[str, ...]
    system_prompts: tuple[str, ...]
    vocabulary: Vocabulary
    rows: tuple[int, int]
    units: tuple[str, ...]
    dates: tuple[str, ...]
    qualified: str
    has_marks: bool = True
    template_digest: str | None = None
    head: str = ""
    end_id: int | None = None

    def render(self, instruction: str, documents: Texts, question: str) -> str:
        """Return a prompt without its answer. All renderers raise ValueError for a part that holds a mark."""
        return self.render_conversation(instruction, (), question, documents)

    def render_conversation(self, system: str, turns: Sequence[Turn], question: str, documents: Texts = ()) -> str:
        """Return a prompt of finished turns, `documents` and an open question."""
        parts = [_marked(INSTRUCTION_MARK, system)]
        for turn in (*turns, Turn(question, "", tuple(documents))):
            parts += [_marked(DOCUMENT_MARK, *turn.documents), _marked(QUESTION_MARK, turn.question)]
            parts += [_marked(ANSWER_MARK, turn.answer), END_MARK]
        return self._put("".join(parts[:-1]))

    def render_pages(self, instruction: str, pages: Texts) -> str:
        """Return a prompt of one instruction and documents; the last breaks off and is to be continued."""
        return self._put(_marked(INSTRUCTION_MARK, instruction) + _marked(DOCUMENT_MARK, *pages))

    def _put(self, prompt: str) -> str:
        if not self.has_marks:
            for mark, heading in zip(MARKS, _HEADINGS, strict=True):
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
_KINDS, _NAMES, _ITEMS = (words(WORDS[f"yardstick {each}"]) for each in ("place kinds", "place names", "items"))
# This model was trained on lists of these words and lengths only; other words halve its exact match.
YARDSTICK = replace(
    SHIPPED,
    name="yardstick",
    instructions=_YARDSTICK_INSTRUCTIONS,
    system_prompts=_YARDSTICK_INSTRUCTIONS,
    vocabulary=Vocabulary(_KINDS, _NAMES, _ITEMS, least=5),
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
CHAT = "chat"
_CONTEXT = "Context:"
# No template, tokenizer or text has these.
_PROBES = _SYSTEM, _ASKED, _ANSWERED, _NEXT = "\x01", "\x02", "\x03", "\x04"


@dataclass(frozen=True, slots=True)
class ChatForm(PromptForm):
    """The form of a model with a chat template: documents and question are in the user's turn.

    `takes_system`: the template has a system turn; otherwise the first user turn begins with the instruction."""

    tokenizer: Any = field(default=None, compare=False)
    takes_system: bool = True

    @classmethod
    def of(cls, tokenizer: Any) -> "ChatForm":
        """Return the form of the tokenizer's template. Raises ConfigurationError if it renders no conversation."""
        plain = {each.name: getattr(PLAIN, each.name) for each in fields(PLAIN)}
        why, known = "it leaves out a turn", tokenizer.added_tokens_decoder
        for takes_system in (True, False):
            form = cls(**plain | {"name": CHAT}, tokenizer=tokenizer, takes_system=takes_system)
            try:
                text = form.render_conversation(_SYSTEM, [Turn(_ASKED, _ANSWERED)], _NEXT)
            except ChatError as error:
                why = str(error)
                continue
            if all(each in text for each in _PROBES):
                parts = (text, text.partition(_ANSWERED)[2].strip())
                ids = [tokenizer.encode(part, add_special_tokens=False)[0] for part in parts]
                first, end = (each if each in known else None for each in ids)
                digest = hashlib.sha256(str(tokenizer.get_chat_template()).encode()).hexdigest()
                head = "" if first is None else known[first].content
                return replace(form, template_digest=digest, head=head, end_id=end)
        raise ConfigurationError(f"The model's chat template cannot be used ({why}); name another form with --form.")

    def render_conversation(self, system: str, turns: Sequence[Turn], question: str, documents: Texts = ()) -> str:
        """Do as `PromptForm` does, with the generation prompt. Raises ChatError too, which is a ValueError."""
        said = [system]
        for turn in (*turns, Turn(question, "", tuple(documents))):
            context = [_CONTEXT, *turn.documents] if turn.documents else []
            said += ["\n\n".join([*context, turn.question]), turn.answer]
        for mark in (each.content for each in self.tokenizer.added_tokens_decoder.values() if each.special):
            if any(mark in each for each in said):
                raise ValueError(f"A prompt part must not hold {mark}; it would change the prompt's structure.")
        roles = [*(["system"] if self.takes_system else []), *["user", "assistant"] * (len(turns) + 1)]
        if not self.takes_system:
            said[:2] = ["\n\n".join(filter(None, said[:2]))]
        messages = [{"role": role, "content": each} for role, each in zip(roles[:-1], said[:-1], strict=True)]
        return render_chat({"messages": messages}, self.tokenizer)[0]

    def render_pages(self, instruction: str, pages: Texts) -> str:
        """Do as `PromptForm` does; the user's turn stays open after the last page."""
        return self.render_conversation(instruction, (), "\n\n".join([_CONTEXT, *pages]) + _NEXT).partition(_NEXT)[0]


FORMS = {form.name: form for form in (SHIPPED, YARDSTICK, PLAIN)}
FORM_NAMES = (*FORMS, CHAT)


def form_for(tokenizer: Any, name: str | None = None) -> PromptForm:
    """Return the form `name`; without one, that of marks that `tokenizer` knows, else of its chat template, else PLAIN.
    Raises ConfigurationError for an unknown name, and for a template that is missing or cannot be used."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if name is not None and name not in FORM_NAMES:
        raise ConfigurationError(f"The prompt form {name!r} is unknown; use {', '.join(FORM_NAMES)}.")
    if name == CHAT and not has_template:
        raise ConfigurationError("The model's tokenizer has no chat template; name another form with --form.")
    if name in FORMS:
        return FORMS[name]
    known = tokenizer.get_vocab()
    if name == CHAT or any(mark not in known for mark in MARKS):
        return ChatForm.of(tokenizer) if has_template else PLAIN
    # Both small models know the same marks; the shipped one knows 2,048 tokens.
    return SHIPPED if len(known) == 2_048 else YARDSTICK
