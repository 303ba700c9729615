"""The built-in cases: seeded, sized in the model's own tokens, each with donors that hold its text elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation import documents, prompts
from validation.cases import Case, Expectation
from validation.families.group import broken_page, turns_of

if TYPE_CHECKING:
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


_EXPECTED = {UNRELATED: Expectation.NONE, REPEAT: Expectation.EXACT_PREFIX}
_Count = Callable[[str], int]
# A donor, and prompts with their references.
_Texts = tuple[str, list[tuple[str, str]]]


def write_batches(batches: tuple[Batch, ...], count: _Count, seed: int, context: int) -> list[Case]:
    """The cases of all batches whose size fits into `context` tokens, of which `count` gives those of a text; equal
    seeds write equal cases. Raises ConfigurationError when no size fits."""
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
            cases.extend(_group(batch, count, name, random.Random(f"{seed}/{name}")))
    return cases


def _group(batch: Batch, count: _Count, name: str, rng: random.Random) -> list[Case]:
    write = {CUT_TURNS: _cut_turns, UNRELATED: _unrelated}.get(batch.workload, _same_documents)
    donor, asked = write(batch, count, rng, SIZES[batch.size] - _FRAME_TOKENS[batch.kind])
    return [
        Case(
            id=name if index == 0 else f"{name}-question-{index}",
            workload=batch.workload,
            size=batch.size,
            donors=(prompt if batch.workload == REPEAT else donor,),
            prompt=prompt,
            reference=reference,
            known_answer=batch.kind != "prose",
            expects=_EXPECTED.get(batch.workload, Expectation.REUSE),
            group=name,
        )
        for index, (prompt, reference) in enumerate(asked)
    ]


def _same_documents(batch: Batch, count: _Count, rng: random.Random, budget: int) -> _Texts:
    """The donor's documents again: reordered, behind another system prompt, or word for word. In prose the last page
    breaks off, and the reference is how it goes on."""
    shown, is_prose = _documents(count, rng, batch.kind, budget), batch.kind == "prose"
    is_conversation = batch.workload == SYSTEM_PROMPT and not is_prose
    earlier, opening = _openings(count, rng, prompts.SYSTEM_PROMPTS if is_conversation else prompts.INSTRUCTIONS)
    before = [document.text for document in shown]
    after = list(before)
    if batch.workload == REORDERED:
        rng.shuffle(after)
    if is_prose:
        begun, rest = broken_page(documents.excerpt(rng, 900).text)
        donor = prompts.render_pages(earlier, [*before, documents.excerpt(rng, 400).text])
        return donor, [(prompts.render_pages(opening, [*after, begun]), rest)]
    asked, *questions = _questions(rng, shown, batch.questions + 1)
    donor = prompts.render(earlier, before, asked.text)
    return donor, [(prompts.render(opening, after, each.text), each.answer) for each in questions]


def _cut_turns(batch: Batch, count: _Count, rng: random.Random, budget: int) -> _Texts:
    """A conversation that went on until its oldest turns no longer fitted."""
    kept = _documents(count, rng, batch.kind, budget, _TURN_TOKENS)
    cut = _documents(count, rng, batch.kind, int(budget * _CUT_SHARE), _TURN_TOKENS)
    system = rng.choice(prompts.SYSTEM_PROMPTS)
    kept_turns, cut_turns = turns_of(rng, kept), turns_of(rng, cut)
    asked, *questions = _questions(rng, kept, batch.questions + 1)
    donor = prompts.render_conversation(system, [*cut_turns, *kept_turns], asked.text)
    return donor, [(prompts.render_conversation(system, kept_turns, each.text), each.answer) for each in questions]


def _unrelated(batch: Batch, count: _Count, rng: random.Random, budget: int) -> _Texts:
    """Donors of the same kind and size that share no document with the prompt."""
    others, own = (_documents(count, rng, batch.kind, budget) for _ in range(2))
    earlier, opening = _openings(count, rng, prompts.INSTRUCTIONS)
    [asked], [question] = _questions(rng, others, 1), _questions(rng, own, 1)
    donor = prompts.render(earlier, [document.text for document in others], asked.text)
    return donor, [(prompts.render(opening, [document.text for document in own], question.text), question.answer)]


def _documents(count: _Count, rng: random.Random, kind: str, budget: int, extra: int = 0) -> list[Document]:
    """Documents of one kind that fill `budget` tokens as far as whole ones do, with `extra` tokens around each."""
    shown: list[Document] = []
    used = 0
    while True:
        document = _document(rng, kind)
        used += count(prompts.DOCUMENT_MARK + document.text) + extra
        if used > budget and shown:
            return shown
        shown.append(document)


def _document(rng: random.Random, kind: str) -> Document:
    if kind == "stock":
        return documents.stock_list(rng, rows=rng.randint(*_STOCK_ROWS))
    if kind == "facts":
        return documents.fact_sheet(rng, people=rng.randint(*_PEOPLE))
    return documents.excerpt(rng, rng.randint(*_PROSE_CHARACTERS))


def _openings(count: _Count, rng: random.Random, source: tuple[str, ...]) -> tuple[str, str]:
    """Two openings of different token length, so that what follows them is shifted."""
    while True:
        earlier, opening = rng.sample(source, 2)
        if count(earlier) != count(opening):
            return earlier, opening


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


def _longest_text(batch: Batch) -> int:
    """Tokens of the batch's longest prompt or donor, at most."""
    return int(SIZES[batch.size] * (1 + _CUT_SHARE if batch.workload == CUT_TURNS else 1))
