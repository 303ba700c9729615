"""Families in which a reused text means something else than it did in the donor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.cases import Expectation
from validation.documents import Document, counted_list
from validation.families.group import Asked
from validation.families.questions import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from validation.cases import Case
    from validation.families.group import Group

    Pairs = Iterator[tuple[str, str]]


def header(group: Group) -> list[Case]:
    """Two lists of the same items exchange their headers; a row's place stands only in front of the shared rows."""
    places = group.places()
    return _exchanged(group, ((place, next(places)) for place in places))


def mid_sentence(group: Group) -> list[Case]:
    """As `header`, but both places share their second word: the shared text begins in the middle of the header."""
    return _exchanged(group, _same_names(group))


def near_duplicates(group: Group) -> list[Case]:
    """The donor's lists in the donor's order; in every second one, one count differs. Only that count is asked for."""
    form, rng = group.form, group.rng
    earlier, opening = group.openings()
    before = group.stock_lists(group.room)
    after, changed = list(before), list[Asked]()
    for index in range(1, len(before), 2):
        asked = rng.choice(before[index].questions)
        item, place = asked.text.removeprefix("How many ").removesuffix("?").split(" are in ")
        rows = dict(row.split(": ") for row in before[index].text.split("\n")[1:])
        counts = {each: int(count) for each, count in rows.items()}
        counts[item] = _other_number(group, counts[item])
        after[index] = counted_list(place, counts)
        changed.append(Asked(asked.text, str(counts[item]), asked.answer))
    texts = [document.text for document in after]
    rng.shuffle(changed)
    asked_again = [changed[index % len(changed)] for index in range(group.questions)]
    prompts = [Asked(form.render(opening, texts, each.prompt), each.answer, each.donor_answer) for each in asked_again]
    [last] = ask(rng, before[:1], 1)
    donors = [form.render(earlier, [document.text for document in before], last.text)]
    return group.cases(donors, prompts, Expectation.REUSE)


def _exchanged(group: Group, pairs: Pairs) -> list[Case]:
    """Lists in pairs of the same items; the donor has the rows of each under the header of the other."""
    rng, form = group.rng, group.form
    earlier, opening = group.openings()
    room, used = group.room, 0
    before, after, wrong = list[Document](), list[Document](), dict[str, str]()
    for first, second in pairs:
        items = group.items()
        rows = group.counts(items)
        others = group.counts(rng.sample(items, len(items)), unlike=rows)
        own = [counted_list(first, rows), counted_list(second, others)]
        swapped = [counted_list(second, rows), counted_list(first, others)]
        used += sum(max(group.length(a.text), group.length(b.text)) for a, b in zip(own, swapped, strict=True))
        if used > room and after:
            break
        after.extend(own)
        before.extend(swapped)
        wrong.update((each.text, each.answer) for document in swapped for each in document.questions)
    rng.shuffle(before)
    rng.shuffle(after)
    texts = [document.text for document in after]
    asked = [
        Asked(form.render(opening, texts, each.text), each.answer, wrong[each.text])
        for each in ask(rng, after, group.questions)
    ]
    [last] = ask(rng, before, 1)
    donors = [form.render(earlier, [document.text for document in before], last.text)]
    return group.cases(donors, asked, Expectation.REUSE)


def _same_names(group: Group) -> Pairs:
    words = group.form.vocabulary
    for name in group.rng.sample(words.place_names, len(words.place_names)):
        first, second = group.rng.sample(words.place_kinds, 2)
        yield f"{first} {name}", f"{second} {name}"


def _other_number(group: Group, number: int) -> int:
    """A number with as many digits of which one differs."""
    while True:
        digits = list(str(number))
        digits[group.rng.randrange(len(digits))] = group.rng.choice("123456789")
        other = int("".join(digits))
        if other != number:
            return other
