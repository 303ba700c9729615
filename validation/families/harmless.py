"""Families in which no reused text hangs on what stood in front of it in the donor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation import documents
from validation.cases import Expectation
from validation.families.group import Asked
from validation.families.questions import ask
from validation.prompts import Turn

if TYPE_CHECKING:
    from validation.cases import Case
    from validation.documents import Document
    from validation.families.group import Group

# Question, answer and marks of a turn beside its document.
_TURN_TOKENS = 30
# A conversation before its oldest turns are cut is longer than what is left of it by this part of the whole.
_CUT_SHARE = 0.25
_PAGE_CHARACTERS = (600, 1_400)
_REFERENCE_CHARACTERS = 160


def reordered(group: Group) -> list[Case]:
    """Stock lists in another order under another instruction."""
    earlier, opening = group.openings()
    shown = group.stock_lists(group.room)
    again = group.rng.sample(shown, len(shown))
    return _same_lists(group, (earlier, shown), (opening, again))


def system_prompt(group: Group) -> list[Case]:
    """Unchanged stock lists behind another system prompt."""
    earlier, opening = group.openings(group.form.system_prompts)
    shown = group.stock_lists(group.room)
    return _same_lists(group, (earlier, shown), (opening, shown))


def cut_turns(group: Group) -> list[Case]:
    """A conversation that went on until its oldest turns no longer fitted; one list a turn."""
    rng, form = group.rng, group.form
    system, places = rng.choice(form.system_prompts), group.places()
    cut = group.stock_lists(int(group.room * _CUT_SHARE), _TURN_TOKENS, places)
    used = sum(group.length(document.text) + _TURN_TOKENS for document in cut)
    kept = group.stock_lists(group.room - used, _TURN_TOKENS, places)
    cut_turns, kept_turns = _turns(group, cut), _turns(group, kept)
    last, *questions = ask(rng, kept, group.questions + 1)
    donor = form.render_conversation(system, [*cut_turns, *kept_turns], last.text)
    asked = [Asked(form.render_conversation(system, kept_turns, each.text), each.answer) for each in questions]
    return group.cases([donor], asked, Expectation.REUSE)


def prose(group: Group) -> list[Case]:
    """Pages of prose in another order, then a page that breaks off; the reference is how it goes on."""
    rng, form = group.rng, group.form
    earlier, opening = group.openings()
    broken = [_broken_page(documents.excerpt(rng, 900).text) for _ in range(group.questions)]
    room = group.room - max(group.length(begun) for begun, _ in broken)
    pages, used = list[str](), 0
    while True:
        page = documents.excerpt(rng, rng.randint(*_PAGE_CHARACTERS)).text
        used += group.length(page)
        if used > room and pages:
            break
        pages.append(page)
    again = rng.sample(pages, len(pages))
    asked = [Asked(form.render_pages(opening, [*again, begun]), rest) for begun, rest in broken]
    return group.cases([form.render_pages(earlier, pages)], asked, Expectation.REUSE, known=False)


def _same_lists(group: Group, donor: tuple[str, list[Document]], target: tuple[str, list[Document]]) -> list[Case]:
    (earlier, before), (opening, after) = donor, target
    last, *questions = ask(group.rng, after, group.questions + 1)
    texts = [document.text for document in after]
    asked = [Asked(group.form.render(opening, texts, each.text), each.answer) for each in questions]
    donors = [group.form.render(earlier, [document.text for document in before], last.text)]
    return group.cases(donors, asked, Expectation.REUSE)


def _turns(group: Group, shown: list[Document]) -> list[Turn]:
    """One turn a list: it is shown, asked about and answered."""
    questions = [group.rng.choice(document.questions) for document in shown]
    return [
        Turn(question.text, question.answer, (document.text,))
        for document, question in zip(shown, questions, strict=True)
    ]


def _broken_page(page: str) -> tuple[str, str]:
    cut = page.rfind(" ", 0, max(1, len(page) - _REFERENCE_CHARACTERS))
    return page[:cut], page[cut:]
