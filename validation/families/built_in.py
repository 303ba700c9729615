"""Families of our own making: harmless reuse, traps in which a reused text changes its meaning, and controls.

First those of marked stock lists, then those in plain English."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

from validation import documents
from validation.cases import Case, equal_start
from validation.documents import Document, Question, counted_list
from validation.families.group import Group, Side, ask, turns_of

Documents = Sequence[Document]
Places = Callable[[Group], Iterator[tuple[str, str]]]
Value = TypeVar("Value")

# Question, answer and marks of a turn beside its document.
_TURN_TOKENS = 30
# Share of a conversation that its oldest turns take, which are cut.
_CUT_SHARE = 0.25
_PAGE_CHARACTERS = (600, 1_400)


def reordered(group: Group) -> list[Case]:
    """Stock lists in another order under another instruction."""
    earlier, opening = group.openings()
    shown = group.stock_lists(group.room)
    again = group.rng.sample(shown, len(shown))
    last, *questions = ask(group.rng, again, group.questions + 1)
    return group.look_ups(Side(earlier, shown), last, Side(opening, again), questions)


def system_prompt(group: Group) -> list[Case]:
    """Unchanged stock lists after another system prompt."""
    earlier, opening = group.openings(group.form.system_prompts)
    shown = group.stock_lists(group.room)
    last, *questions = ask(group.rng, shown, group.questions + 1)
    return group.look_ups(Side(earlier, shown), last, Side(opening, shown), questions)


def cut_turns(group: Group) -> list[Case]:
    """A conversation that went on until its oldest turns no longer fitted; one list a turn."""
    rng = group.rng
    system, places = rng.choice(group.form.system_prompts), group.places()
    cut = group.stock_lists(int(group.room * _CUT_SHARE), _TURN_TOKENS, places)
    used = sum(group.length(document.text) + _TURN_TOKENS for document in cut)
    kept = group.stock_lists(group.room - used, _TURN_TOKENS, places)
    oldest, turns = turns_of(rng, cut), turns_of(rng, kept)
    last, *questions = ask(rng, kept, group.questions + 1)
    return group.look_ups(Side(system, (), [*oldest, *turns]), last, Side(system, (), turns), questions)


def prose(group: Group) -> list[Case]:
    """Pages of prose in another order, then a page that breaks off; the reference is how it goes on."""
    rng, form = group.rng, group.form
    earlier, opening = group.openings()
    broken = []
    for _ in range(group.questions):
        page = documents.excerpt(rng, 900)
        cut = page.rfind(" ", 0, max(1, len(page) - 160))
        broken.append((page[:cut], page[cut:]))
    room = group.room - max(group.length(start) for start, _ in broken)
    pages = list[str]()
    while True:
        page = documents.excerpt(rng, rng.randint(*_PAGE_CHARACTERS))
        room -= group.length(page)
        if room < 0 and pages:
            break
        pages.append(page)
    again = rng.sample(pages, len(pages))
    asked = [Question(form.render_pages(opening, [*again, start]), rest) for start, rest in broken]
    return group.cases([form.render_pages(earlier, pages)], asked, known=False)


def unrelated(group: Group) -> list[Case]:
    """Donors of the same kind and size that share no document with the prompt, nor its instruction."""
    places = group.places()
    earlier, opening = group.openings()
    others, own = (group.stock_lists(group.room, places=places) for _ in range(2))
    [last] = ask(group.rng, others, 1)
    return group.look_ups(Side(earlier, others), last, Side(opening, own), ask(group.rng, own, group.questions))


def repeat(group: Group) -> list[Case]:
    """Every prompt was served before, word for word."""
    shown = group.stock_lists(group.room)
    side = Side(group.rng.choice(group.form.instructions), shown)
    asked = [replace(each, text=side.prompt(group.form, each)) for each in ask(group.rng, shown, group.questions)]
    return group.cases([each.text for each in asked], asked)


def near_duplicates(group: Group) -> list[Case]:
    """The donor's lists in its order; in every second one a count differs by a digit. Questions ask for these first."""
    rng = group.rng
    earlier, opening = group.openings()
    before = group.stock_lists(group.room)
    after, changed, others = list(before), list[Question](), list[Document]()
    for index in range(1, len(before), 2):
        list_before = before[index]
        question = rng.choice(list_before.questions)
        item = question.text.removeprefix("How many ").partition(" are in ")[0]
        place = rng.randrange(len(question.answer))
        digit = rng.choice([each for each in "123456789" if each != question.answer[place]])
        number = question.answer[:place] + digit + question.answer[place + 1 :]
        text = list_before.text.replace(f"\n{item}: {question.answer}", f"\n{item}: {number}")
        after[index] = Document(text, ())
        changed.append(Question(question.text, number, question.answer))
        others.append(Document(text, tuple(each for each in list_before.questions if each is not question)))
    rng.shuffle(changed)
    rest = ask(rng, others, max(0, group.questions - len(changed)))
    [last] = ask(rng, before[:1], 1)
    return group.look_ups(Side(earlier, before), last, Side(opening, after), [*changed, *rest][: group.questions])


# Lists of one register: more of them, or other documents beside them, the second yardstick does not answer.
_LISTS = 6


def link(group: Group) -> list[Case]:
    """A register before the lists says which place each belongs to; only the register has changed. The second yardstick
    answers all of it cold. Moved KV loses three of ten answers, two of them to the donor's, also with two layers
    computed whole. A check there computes two tokens of a prompt and loses none."""
    names, places, counts = _lists_without_place(group)
    owners = (_rotated(places), places)
    before, after = (list(map(documents.named_list, names, each, counts)) for each in owners)
    registers = [documents.register(dict(zip(names, each, strict=True))) for each in owners]
    return _asked_of_both(group, before, after, registers)


def edited_field(group: Group) -> list[Case]:
    """The same register, and an edited name in every list: the rows after it have drawn conclusions from the old name.
    The second yardstick answers it cold as it does `link`."""
    names, places, counts = _lists_without_place(group)
    sides = (_rotated(names), _rotated(places)), (names, places)
    before, after = (list(map(documents.named_list, *each, counts)) for each in sides)
    return _asked_of_both(group, before, after, [documents.register(dict(zip(names, places, strict=True)))] * 2)


def _lists_without_place(group: Group) -> tuple[list[str], list[str], list[dict[str, int]]]:
    """Return names, places and counts of lists of the same items, in which no item has the same count twice."""
    rng, words, items = group.rng, group.form.vocabulary, group.items()
    numbers = [rng.sample(range(words.least, words.most + 1), _LISTS) for _ in items]
    columns = (list(zip(items, column, strict=True)) for column in zip(*numbers, strict=True))
    counts = [dict(rng.sample(column, len(column))) for column in columns]
    names, places = rng.sample(documents.LIST_NAMES, _LISTS), list(itertools.islice(group.places(), _LISTS))
    used, fitting = 0, 0
    for name, place, own in zip(names, places, counts, strict=True):
        # Each list has its line in the register.
        parts = documents.named_list(name, place, own), documents.register({name: place})
        used += sum(group.length(part.text) for part in parts)
        fitting += used <= group.room
    count = max(2, fitting)
    return names[:count], places[:count], counts[:count]


def _rotated(values: Sequence[Value]) -> list[Value]:
    return [*values[1:], *values[:1]]


def _asked_of_both(group: Group, before: Documents, after: Documents, fronts: Documents = ()) -> list[Case]:
    """Return questions on `after`; the donor holds `before`. `fronts` precede the documents in donor and prompt."""
    earlier, opening = group.openings()
    sides = Side(earlier, [*fronts[:1], *before]), Side(opening, [*fronts[1:], *after])
    return _cases(group, *sides, about=after, last_about=before)


def _exchanged(places: Places, heading: str = "HEADER", rows_between: int = 0) -> Callable[[Group], list[Case]]:
    """Return the family whose lists, of the same items under `heading`, are exchanged for the pairs of `places`. The
    first `rows_between` rows of a list stay. It holds the pairs that fit, in another order in the donor."""

    def listed(place: str, kept: Mapping[str, int], exchanged: Mapping[str, int]) -> Document:
        header, _, rows = counted_list(place, {**kept, **exchanged}).text.partition("\n")
        text = heading.replace("HEADER", header).replace("PLACE", place) + "\n" + rows
        return Document(text, counted_list(place, exchanged).questions)

    def lists(group: Group, pair: tuple[str, str]) -> list[list[Document]]:
        items = group.items(rows_between)
        shared = items[2 * rows_between :]
        kept = [group.counts(part) for part in (items[:rows_between], items[rows_between : 2 * rows_between])]
        one = group.counts(shared)
        other = group.counts(group.rng.sample(shared, len(shared)), unlike=one)
        sides = (other, one), (one, other)
        return [[listed(*each) for each in zip(pair, kept, rows, strict=True)] for rows in sides]

    def write(group: Group) -> list[Case]:
        room, before, after = group.room, list[Document](), list[Document]()
        for pair in places(group):
            donor, own = lists(group, pair)
            room -= max(sum(group.length(each.text) for each in side) for side in (donor, own))
            if room < 0 and after:
                break
            before += donor
            after += own
        group.rng.shuffle(before)
        group.rng.shuffle(after)
        return _asked_of_both(group, before, after)

    return write


def _place_pairs(group: Group) -> Iterator[tuple[str, str]]:
    places = group.places()
    return zip(places, places, strict=False)


def _alike(group: Group) -> Iterator[tuple[str, str]]:
    """Yield two places of one kind whose names share the most first letters, the most alike first."""
    words, rng = group.form.vocabulary, group.rng
    # A planter takes the most alike of 64 names.
    names = sorted(rng.sample(words.place_names, min(64, len(words.place_names))))
    taken = set[str]()
    for pair in sorted(itertools.pairwise(names), key=lambda pair: -equal_start(*pair)):
        if taken.isdisjoint(pair):
            taken.update(pair)
            kind = rng.choice(words.place_kinds)
            first, second = rng.sample(pair, 2)
            yield f"{kind} {first}", f"{kind} {second}"


def _qualified(group: Group, words: Sequence[str], pattern: str = "{word} {name}") -> Iterator[tuple[str, str]]:
    """Yield two places that share their name, which differs from pair to pair."""
    for name in group.rng.sample(group.form.vocabulary.place_names, len(group.form.vocabulary.place_names)):
        first, second = (pattern.format(word=word, name=name) for word in group.rng.sample(words, 2))
        yield first, second


# Two lists of the same items exchange their headers; a row's place is named only before the shared rows.
header = _exchanged(_place_pairs)
# The first rows stay with their header, and lie between it and the shared rows.
far_header = _exchanged(_place_pairs, rows_between=2)
# Both places share their second word: the shared text begins in the middle of the header.
mid_sentence = _exchanged(lambda group: _qualified(group, group.form.vocabulary.place_kinds))
# The shared text calls the place by another name, which is introduced before the shared text.
alias = _exchanged(_place_pairs, "Stock list of PLACE, here the store.\nCounts of the store.")
# The shared text begins with a pronoun for the place, which is named only before it.
pronoun = _exchanged(_place_pairs, "HEADER\nIt holds these items.")
# Places are spelt almost alike: a check of KV is least likely to notice their exchange.
planted = _exchanged(_alike)
# Two lists of one place, each in another unit, or of another date, which only the heading says.
unit = _exchanged(lambda group: _qualified(group, group.form.units, group.form.qualified))
date = _exchanged(lambda group: _qualified(group, group.form.dates, group.form.qualified))


_INSTRUCTIONS = tuple(documents.WORDS["english instructions"].splitlines())
# Most documents of one prompt, and the most characters of the prose in one.
_MOST = 128
_PROSE_CHARACTERS = 600
# What follows is in plain English, for any model: text that was seen before comes back after something has changed.
# Tokens beside a document: marks, question and answer of its turn; its line in a register; its part of the opening.
_SHOWN_TOKENS, _LINE_TOKENS, _OPENING_TOKENS = 45, 18, 16
_EPOCH = datetime(2026, 1, 5, 8)


def _cases(group: Group, before: Side, after: Side, about: Documents = (), last_about: Documents = ()) -> list[Case]:
    """Return questions on `about`, by default on all documents of `after`; the donor shows `before`."""
    questions = ask(group.rng, about or after.documents, group.questions)
    [last] = ask(group.rng, last_about or about or after.documents, 1)
    given = {each.text: each.answer for document in before.documents for each in document.questions}
    wrong = ((each, given.get(each.text)) for each in questions)
    asked = [replace(each, donor_answer=None if other == each.answer else other) for each, other in wrong]
    return group.look_ups(before, last, after, asked)


def _prose(group: Group) -> Iterator[str]:
    """Yield prose of which about four pieces, or more, fit the group's room."""
    most = min(_PROSE_CHARACTERS, group.room)
    return (documents.excerpt(group.rng, group.rng.randint(most // 2, most)) for _ in range(_MOST))


def _passages(group: Group, extra: int = 0) -> list[Document]:
    """Return passages of prose, after each of which a person is described."""
    both = zip(_prose(group), documents.biographies(group.rng, _MOST), strict=True)
    described = (replace(each, text=f"{text}\n{each.text}") for text, each in both)
    return group.fitting(described, group.room, extra)


def volatile(group: Group) -> list[Case]:
    """Date and user in the opening have changed. The user is an account: the questions are about people."""
    rng, instruction, shown = group.rng, group.rng.choice(_INSTRUCTIONS), _passages(group, _OPENING_TOKENS)
    sides = []
    for name in documents.names(rng, 2):
        time, (first, _, last) = _EPOCH + timedelta(minutes=rng.randrange(10**6)), name.lower().partition(" ")
        user = f"{first[0]}{last}{rng.randrange(10, 100)}"
        sides.append(Side(f"Date: {time:%A, %d %B %Y, %H:%M}. Signed in: {user}.\n\n{instruction}", shown))
    return _cases(group, sides[0], sides[1])


def instruction(group: Group) -> list[Case]:
    """The same passages in the same order under another instruction."""
    earlier, opening = group.openings(_INSTRUCTIONS)
    shown = _passages(group)
    return _cases(group, Side(earlier, shown), Side(opening, shown))


def headings(group: Group) -> list[Case]:
    """Records of people, whose names, in the headings, have changed places."""
    earlier, opening = group.openings(_INSTRUCTIONS)
    after = group.fitting(documents.records(group.rng, _MOST), group.room)
    names = [document.text.partition("\n")[0] for document in after]
    before = list(map(documents.renamed, after, names, _rotated(names)))
    return _cases(group, Side(earlier, before), Side(opening, after))


def replaced(group: Group) -> list[Case]:
    """The first passage is another one."""
    opening = group.rng.choice(_INSTRUCTIONS)
    other, *shown = _passages(group)
    return _cases(group, Side(opening, [other, *shown[1:]]), Side(opening, shown))


def inner_edit(group: Group) -> list[Case]:
    """Some words in the middle of an early passage have changed."""
    opening, before = group.rng.choice(_INSTRUCTIONS), _passages(group, _OPENING_TOKENS)
    index = len(before) // 3
    prose, _, person = before[index].text.rpartition("\n")
    words = prose.split(" ")
    words[len(words) // 2 : len(words) // 2 + 3] = ["the", "old", "grey", "harbour"]
    after = list(before)
    after[index] = replace(before[index], text=f"{' '.join(words)}\n{person}")
    return _cases(group, Side(opening, before), Side(opening, after))


def dropped_turn(group: Group) -> list[Case]:
    """A conversation that has lost its oldest turn; each turn shows a passage."""
    opening, shown = group.rng.choice(_INSTRUCTIONS), _passages(group, _SHOWN_TOKENS)
    turns = turns_of(group.rng, shown)
    return _cases(group, Side(opening, (), turns), Side(opening, (), turns[1:]), shown[1:])


def other_turn(group: Group) -> list[Case]:
    """Another user's turn has come between the turns and the passages of a conversation."""
    opening, (other, *shown) = group.rng.choice(_INSTRUCTIONS), _passages(group, _SHOWN_TOKENS)
    middle = len(shown) // 2
    turns, between = turns_of(group.rng, shown[:middle]), turns_of(group.rng, [other])
    before, after = (Side(opening, shown[middle:], each) for each in (turns, [*turns, *between]))
    return _cases(group, before, after, shown)


def _in_another_order(group: Group, shown: list[Document]) -> list[Case]:
    earlier, opening = group.openings(_INSTRUCTIONS)
    mixed = group.rng.sample(shown, len(shown))
    before = mixed if mixed != shown else [*mixed[1:], mixed[0]]
    return _cases(group, Side(earlier, before), Side(opening, shown))


def order(group: Group) -> list[Case]:
    """The same passages in another order under another instruction."""
    return _in_another_order(group, _passages(group))


def two_hop(group: Group) -> list[Case]:
    """A register says whose desk it is, and has changed; where its people live has not."""
    rng, (earlier, opening) = group.rng, group.openings(_INSTRUCTIONS)
    shown = group.fitting(documents.biographies(rng, _MOST), group.room, _LINE_TOKENS)
    numbers = rng.sample(range(100, 1_000), len(shown))
    before, after = (documents.desks(numbers, owners) for owners in (_rotated(shown), shown))
    return _cases(group, Side(earlier, [before, *shown]), Side(opening, [after, *shown]), [after])


def needle(group: Group) -> list[Case]:
    """Pages of prose in another order, each with two codes that the prose does not lead to."""
    places = group.places()

    def page(prose: str) -> Document:
        both = [(next(places), str(group.rng.randint(1_000, 9_999))) for _ in range(2)]
        first, last = (f"The code of {place} is {code}." for place, code in both)
        asked = (Question(f"What is the code of {place}?", code) for place, code in both)
        return Document(f"{first} {prose} {last}", tuple(asked))

    return _in_another_order(group, group.fitting(map(page, _prose(group)), group.room))
