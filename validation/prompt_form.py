"""How the parts of a prompt are put to a model: its marks, its instructions and the words of its world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import ConfigurationError
from validation import prompts
from validation.documents import SHIPPED_VOCABULARY, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.prompts import Turn


@dataclass(frozen=True, slots=True)
class PromptForm:
    """`rows` are the least and most rows of a stock list that the model reads reliably.

    `instructions` and `system_prompts` differ in length. `qualified` is how a heading and a question name the list of
    a place ("name") in one of the `units` or of one of the `dates` ("word"). Without `has_marks`, plain headings stand
    for the marks.
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
        """Return a prompt of one instruction, documents in order and a question; raises ValueError for a mark."""
        return self._put(prompts.render(instruction, documents, question))

    def render_conversation(self, system: str, turns: Sequence[Turn], question: str) -> str:
        """Return a prompt of finished turns and an open question; raises ValueError for a mark inside a part."""
        return self._put(prompts.render_conversation(system, turns, question))

    def render_pages(self, instruction: str, pages: Sequence[str]) -> str:
        """Return a prompt whose last page is to be continued; raises ValueError for a mark inside a part."""
        return self._put(prompts.render_pages(instruction, pages))

    def _put(self, prompt: str) -> str:
        return prompt if self.has_marks else prompts.in_plain_text(prompt)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Both small models know places of two words only, so a unit or a date takes the place of the first.
_UNITS = _words("Box Crate Pair Dozen Bag Sack Pound Barrel")
_DATES = _words("Spring Summer Autumn Winter")
_TWO_WORDS = "{word} {name}"

SHIPPED = PromptForm(
    "shipped",
    prompts.INSTRUCTIONS,
    prompts.SYSTEM_PROMPTS,
    SHIPPED_VOCABULARY,
    (12, 18),
    _UNITS,
    _DATES,
    _TWO_WORDS,
)

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
# A model of this form has read lists of these words and lengths only; other words halve its exact match.
YARDSTICK = PromptForm(
    "yardstick",
    _YARDSTICK_INSTRUCTIONS,
    _YARDSTICK_INSTRUCTIONS,
    Vocabulary(
        _words("Depot Vault Shed Plant Store Warehouse Yard Branch Annex Hangar Outlet Office Kiosk Dock Cellar"),
        _words(
            "Split Turku Pune Hanoi Turin Delhi Ghent Quito Bern Reno Porto Leeds Kazan Kyoto Sofia Lima Boise Dakar "
            "Malmo Salem Tulsa Vigo Basel Tunis Omsk Osaka Omaha Perth Riga Essex Izmir Accra Cairo Oslo Derby Tampa "
            "Lyon Graz Miami Minsk"
        ),
        _words(
            "nails tents drills boots flags bolts kites screws gloves clocks maps coats bricks keys chairs carts "
            "phones vans boats screens bells lamps tiles books pipes drums tablets hats saws cables locks scarves "
            "axes belts hinges pumps radios ropes rings desks"
        ),
        least=5,
    ),
    (8, 9),
    _UNITS,
    _DATES,
    _TWO_WORDS,
)
PLAIN = PromptForm(
    "plain",
    prompts.INSTRUCTIONS,
    prompts.SYSTEM_PROMPTS,
    SHIPPED_VOCABULARY,
    (12, 18),
    _words("boxes crates pairs dozens bags sacks pounds barrels"),
    _words("January February March April May June July August September October November December"),
    "{name} in {word}",
    has_marks=False,
)
FORMS = {form.name: form for form in (SHIPPED, YARDSTICK, PLAIN)}
# Both models know the same marks; the shipped one's tokenizer is the small one.
_SHIPPED_VOCABULARY_SIZE = 2_048


def form_for(tokenizer: Any, name: str | None = None) -> PromptForm:
    """The form called `name`; without a name, the one whose marks `tokenizer` (of Transformers) knows, else PLAIN.

    Raises ConfigurationError for an unknown name.
    """
    if name is not None:
        if name not in FORMS:
            raise ConfigurationError(f"The prompt form {name!r} is unknown; use {', '.join(FORMS)}.")
        return FORMS[name]
    known = tokenizer.get_vocab()
    if any(mark not in known for mark in prompts.MARKS):
        return PLAIN
    return SHIPPED if len(known) == _SHIPPED_VOCABULARY_SIZE else YARDSTICK
