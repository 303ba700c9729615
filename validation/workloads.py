"""The built-in cases: seeded, sized in the model's own tokens, each with donors that hold its text elsewhere."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation import documents, prompts
from validation.cases import Case, Expectation

if TYPE_CHECKING:
    from collections.abc import Callable

    from validation.documents import Document, Question

REORDERED = "reordered"
SYSTEM_PROMPT = "system_prompt"
CUT_TURNS = "cut_turns"
UNRELATED = "unrelated"
REPEAT = "repeat"
HARMLESS = (REORDERED, SYSTEM_PROMPT, CUT_TURNS)

SIZES = {"1k": 1_024, "2k": 2_048, "4k": 4_096}
# Room below the nominal size for opening and question (prose: opening and begun page), so that "2k" is 2k with them.
_FRAME_TOKENS = {"stock": 160, "facts": 160, "prose": 480}
_TURN_TOKENS = 24
# A conversation before its oldest turns are cut is longer than what is left of it by this part.
_CUT_SHARE = 1 / 3
_PROSE_REFERENCE_CHARACTERS = 160
# Rows and persons a document: long enough that each document alone is a span worth moving.
_STOCK_ROWS = (12, 20)
_PEOPLE = (4, 6)
_PROSE_CHARACTERS = (600, 1_400)


@dataclass(frozen=True, slots=True)
class Batch:
    """`groups` groups of one workload, kind of text and size, with `questions` cases in each."""

    workload: str
    kind: str
    size: str
    groups: int
    questions: int = 1


DEFAULT_BATCHES = (
    Batch(REORDERED, "stock", "2k", 3, 6),
    Batch(REORDERED, "stock", "4k", 2, 6),
    Batch(REORDERED, "facts", "2k", 1, 6),
    Batch(REORDERED, "prose", "2k", 1),
    Batch(SYSTEM_PROMPT, "stock", "2k", 2, 6),
    Batch(SYSTEM_PROMPT, "stock", "4k", 1, 6),
    Batch(SYSTEM_PROMPT, "prose", "2k", 1),
    Batch(CUT_TURNS, "stock", "2k", 2, 6),
    Batch(CUT_TURNS, "stock", "4k", 1, 6),
    Batch(UNRELATED, "stock", "1k", 6),
    Batch(UNRELATED, "facts", "1k", 3),
    Batch(UNRELATED, "stock", "2k", 2),
    Batch(UNRELATED, "facts", "2k", 1),
    Batch(REPEAT, "stock", "2k", 1),
    Batch(REPEAT, "prose", "2k", 1),
)


class WorkloadWriter:
    """Writes cases whose prompts fit a token budget under `count_tokens`; equal seeds write equal cases."""

    def __init__(self, count_tokens: Callable[[str], int], seed: int) -> None:
        self._count = count_tokens
        self._seed = seed

    def write(self, batches: tuple[Batch, ...], context: int) -> list[Case]:
        """Returns the cases of all batches whose size fits into `context` tokens.

        Raises ConfigurationError when no size fits.
        """
        fitting = [batch for batch in batches if _longest_text(batch) <= context]
        if not fitting:
            smallest = min(map(_longest_text, batches))
            raise ConfigurationError(
                f"The built-in prompts have at least {smallest} tokens, but the model's context leaves {context} for a "
                "prompt; bring shorter cases with --prompts."
            )
        cases: list[Case] = []
        for batch in fitting:
            for index in range(batch.groups):
                name = f"{batch.workload}-{batch.kind}-{batch.size}-{index}"
                # Every group has its own stream, so that adding one batch leaves the others as they are.
                cases.extend(self._group(batch, name, random.Random(f"{self._seed}/{name}")))
        return cases

    def _group(self, batch: Batch, name: str, rng: random.Random) -> list[Case]:
        budget = SIZES[batch.size] - _FRAME_TOKENS[batch.kind]
        if batch.workload == CUT_TURNS:
            kept = self._documents(rng, batch.kind, budget, _TURN_TOKENS)
            cut = self._documents(rng, batch.kind, int(budget * _CUT_SHARE), _TURN_TOKENS)
            return self._cut_turns(batch, name, rng, kept, cut)
        shown = self._documents(rng, batch.kind, budget)
        if batch.workload == UNRELATED:
            return self._unrelated(batch, name, rng, shown, self._documents(rng, batch.kind, budget))
        if batch.kind == "prose":
            return [self._continuation(batch, name, rng, shown)]
        return self._look_ups(batch, name, rng, shown)

    def _look_ups(self, batch: Batch, name: str, rng: random.Random, shown: list[Document]) -> list[Case]:
        """The donor's documents again: reordered, behind another system prompt, or word for word."""
        source = prompts.SYSTEM_PROMPTS if batch.workload == SYSTEM_PROMPT else prompts.INSTRUCTIONS
        earlier, opening = self._two_openings(rng, source)
        donor_documents = [document.text for document in shown]
        target_documents = list(donor_documents)
        if batch.workload == REORDERED:
            rng.shuffle(target_documents)
        asked, *questions = _questions(rng, shown, batch.questions + 1)
        if batch.workload == REPEAT:
            prompt = prompts.render(opening, target_documents, questions[0].text)
            return [_case(batch, name, 0, (prompt,), prompt, questions[0].answer, Expectation.EXACT_PREFIX)]
        donors = (prompts.render(earlier, donor_documents, asked.text),)
        return [
            _case(
                batch,
                name,
                index,
                donors,
                prompts.render(opening, target_documents, question.text),
                question.answer,
                Expectation.REUSE,
            )
            for index, question in enumerate(questions)
        ]

    def _cut_turns(
        self, batch: Batch, name: str, rng: random.Random, kept: list[Document], cut: list[Document]
    ) -> list[Case]:
        """A conversation that went on until its oldest turns, those about `cut`, no longer fitted."""
        system = rng.choice(prompts.SYSTEM_PROMPTS)
        kept_turns, cut_turns = _turns(rng, kept), _turns(rng, cut)
        asked, *questions = _questions(rng, kept, batch.questions + 1)
        donors = (prompts.render_conversation(system, [*cut_turns, *kept_turns], asked.text),)
        return [
            _case(
                batch,
                name,
                index,
                donors,
                prompts.render_conversation(system, kept_turns, question.text),
                question.answer,
                Expectation.REUSE,
            )
            for index, question in enumerate(questions)
        ]

    def _continuation(self, batch: Batch, name: str, rng: random.Random, shown: list[Document]) -> Case:
        """Prose in the donor's documents, then a page that breaks off; the reference is how it goes on."""
        earlier, opening = self._two_openings(rng, prompts.INSTRUCTIONS)
        donor_documents = [document.text for document in shown]
        target_documents = list(donor_documents)
        if batch.workload == REORDERED:
            rng.shuffle(target_documents)
        page = documents.excerpt(rng, 900).text
        cut = page.rfind(" ", 0, max(1, len(page) - _PROSE_REFERENCE_CHARACTERS))
        begun, reference = page[:cut], page[cut:]
        prompt = prompts.render_pages(opening, [*target_documents, begun])
        if batch.workload == REPEAT:
            return _case(batch, name, 0, (prompt,), prompt, reference, Expectation.EXACT_PREFIX)
        other_page = documents.excerpt(rng, 400).text
        donors = (prompts.render_pages(earlier, [*donor_documents, other_page]),)
        return _case(batch, name, 0, donors, prompt, reference, Expectation.REUSE)

    def _unrelated(
        self, batch: Batch, name: str, rng: random.Random, others: list[Document], own: list[Document]
    ) -> list[Case]:
        """Donors of the same kind and size that share no document with the prompt."""
        earlier, opening = self._two_openings(rng, prompts.INSTRUCTIONS)
        asked = _questions(rng, others, 1)[0]
        question = _questions(rng, own, 1)[0]
        donors = (prompts.render(earlier, [document.text for document in others], asked.text),)
        prompt = prompts.render(opening, [document.text for document in own], question.text)
        return [_case(batch, name, 0, donors, prompt, question.answer, Expectation.NONE)]

    def _documents(self, rng: random.Random, kind: str, budget: int, extra: int = 0) -> list[Document]:
        """Documents of one kind that fill `budget` tokens as far as whole ones do, with `extra` tokens around each."""
        shown: list[Document] = []
        used = 0
        while True:
            document = _document(rng, kind)
            used += self._count(prompts.DOCUMENT_MARK + document.text) + extra
            if used > budget and shown:
                return shown
            shown.append(document)

    def _two_openings(self, rng: random.Random, source: tuple[str, ...]) -> tuple[str, str]:
        """Two openings of different token length, so that what follows them is shifted."""
        while True:
            earlier, opening = rng.sample(source, 2)
            if self._count(earlier) != self._count(opening):
                return earlier, opening


def _case(
    batch: Batch,
    group: str,
    index: int,
    donors: tuple[str, ...],
    prompt: str,
    reference: str,
    expects: Expectation,
) -> Case:
    return Case(
        id=group if index == 0 else f"{group}-question-{index}",
        workload=batch.workload,
        size=batch.size,
        donors=donors,
        prompt=prompt,
        reference=reference,
        known_answer=batch.kind != "prose",
        expects=expects,
        group=group,
    )


def _longest_text(batch: Batch) -> int:
    """Tokens of the batch's longest prompt or donor, at most."""
    return int(SIZES[batch.size] * (1 + _CUT_SHARE if batch.workload == CUT_TURNS else 1))


def _document(rng: random.Random, kind: str) -> Document:
    if kind == "stock":
        return documents.stock_list(rng, rows=rng.randint(*_STOCK_ROWS))
    if kind == "facts":
        return documents.fact_sheet(rng, people=rng.randint(*_PEOPLE))
    if kind == "prose":
        return documents.excerpt(rng, rng.randint(*_PROSE_CHARACTERS))
    raise ValueError(f"The kind of text is stock, facts or prose, not {kind!r}.")


def _questions(rng: random.Random, shown: list[Document], count: int) -> list[Question]:
    """`count` different questions on `shown`, from different documents as far as there are enough."""
    order = rng.sample(range(len(shown)), len(shown))
    chosen: dict[str, Question] = {}
    turn = 0
    while len(chosen) < count:
        question = rng.choice(shown[order[turn % len(order)]].questions)
        chosen.setdefault(question.text, question)
        turn += 1
    return list(chosen.values())


def _turns(rng: random.Random, shown: list[Document]) -> list[prompts.Turn]:
    """One turn a document: it is shown, asked about and answered."""
    turns = []
    for document in shown:
        question = rng.choice(document.questions)
        turns.append(prompts.Turn(question.text, question.answer, (document.text,)))
    return turns
