"""Families in which there is nothing to reuse, or nothing but the exact prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.cases import Expectation
from validation.families.group import Asked
from validation.families.questions import ask

if TYPE_CHECKING:
    from validation.cases import Case
    from validation.families.group import Group


def unrelated(group: Group) -> list[Case]:
    """Donors of the same kind and size that share no document with the prompt, nor its instruction."""
    form, places = group.form, group.places()
    earlier, opening = group.openings()
    others, own = (group.stock_lists(group.room, places=places) for _ in range(2))
    [last] = ask(group.rng, others, 1)
    texts = [document.text for document in own]
    questions = ask(group.rng, own, group.questions)
    asked = [Asked(form.render(opening, texts, each.text), each.answer) for each in questions]
    donors = [form.render(earlier, [document.text for document in others], last.text)]
    return group.cases(donors, asked, Expectation.NONE)


def repeat(group: Group) -> list[Case]:
    """Every prompt was served before, word for word."""
    shown = group.stock_lists(group.room)
    opening, texts = group.rng.choice(group.form.instructions), [document.text for document in shown]
    questions = ask(group.rng, shown, group.questions)
    asked = [Asked(group.form.render(opening, texts, each.text), each.answer) for each in questions]
    return group.cases([each.prompt for each in asked], asked, Expectation.EXACT_PREFIX)
