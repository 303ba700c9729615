"""Families in plain English for any model: text that was seen before comes back after something has changed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from validation import documents
from validation.cases import Case, Expectation
from validation.documents import Document, Question
from validation.families.group import Group, ask, turns_of
from validation.prompts import Turn

_INSTRUCTIONS = tuple(documents.WORDS["english instructions"].splitlines())
# Most documents of one prompt, and the most characters of the prose in one.
_MOST = 128
_PROSE_CHARACTERS = 600
# Tokens beside a document: marks, question and answer of its turn; its line in a register; its part of the opening.
_TURN_TOKENS, _LINE_TOKENS, _OPENING_TOKENS = 45, 18, 16
_EPOCH = datetime(2026, 1, 5, 8)


@dataclass(frozen=True, slots=True)
class Side:
    """What a prompt, or its donor, shows before the question; the documents are in the last turn."""

    opening: str
    documents: Sequence[Document]
    turns: Sequence[Turn] = ()

    def prompt(self, group: Group, question: str) -> str:
        shown = [each.text for each in self.documents]
        return group.form.render_conversation(self.opening, self.turns, question, shown)


def _cases(group: Group, before: Side, after: Side, about: Sequence[Document] = ()) -> list[Case]:
    """Return questions on `about`, by default on all documents of `after`, whose donor shows `before`."""
    questions, [last] = (ask(group.rng, about or after.documents, count) for count in (group.questions, 1))
    given = {each.text: each.answer for document in before.documents for each in document.questions}
    asked = []
    for each in questions:
        wrong = given.get(each.text)
        text = after.prompt(group, each.text)
        asked.append(Question(text, each.answer, None if wrong == each.answer else wrong))
    return group.cases([before.prompt(group, last.text)], asked, Expectation.REUSE)


def _fitting(group: Group, source: Iterable[Document], extra: int) -> list[Document]:
    """Return at least two documents that fill the group's room, `extra` tokens beside each."""
    shown, used, room = list[Document](), 0, group.room
    for document in source:
        used += group.length(document.text) + extra
        if used > room and len(shown) > 1:
            break
        shown.append(document)
    return shown


def _prose(group: Group) -> Iterator[str]:
    """Yield prose of which about four pieces, or more, fit the group's room."""
    most = min(_PROSE_CHARACTERS, group.room)
    return (documents.excerpt(group.rng, group.rng.randint(most // 2, most)).text for _ in range(_MOST))


def _passages(group: Group, extra: int = 0) -> list[Document]:
    """Return passages of prose, after each of which a person is described."""
    both = zip(_prose(group), documents.biographies(group.rng, _MOST), strict=True)
    return _fitting(group, (replace(each, text=f"{text}\n{each.text}") for text, each in both), extra)


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
    after = _fitting(group, documents.records(group.rng, _MOST), 0)
    names = [document.text.partition("\n")[0] for document in after]
    others = zip(after, names, [*names[1:], *names[:1]], strict=True)
    before = [documents.renamed(*each) for each in others]
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
    opening, shown = group.rng.choice(_INSTRUCTIONS), _passages(group, _TURN_TOKENS)
    turns = turns_of(group.rng, shown)
    return _cases(group, Side(opening, (), turns), Side(opening, (), turns[1:]), shown[1:])


def other_turn(group: Group) -> list[Case]:
    """Another user's turn has come between the turns and the passages of a conversation."""
    opening, (other, *shown) = group.rng.choice(_INSTRUCTIONS), _passages(group, _TURN_TOKENS)
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
    shown = _fitting(group, documents.biographies(rng, _MOST), _LINE_TOKENS)
    numbers = rng.sample(range(100, 1_000), len(shown))
    before, after = (documents.desks(numbers, owners) for owners in ([*shown[1:], *shown[:1]], shown))
    return _cases(group, Side(earlier, [before, *shown]), Side(opening, [after, *shown]), [after])


def needle(group: Group) -> list[Case]:
    """Pages of prose in another order, each with two codes that the prose does not lead to."""
    places = group.places()

    def page(prose: str) -> Document:
        both = [(next(places), str(group.rng.randint(1_000, 9_999))) for _ in range(2)]
        first, last = (f"The code of {place} is {code}." for place, code in both)
        asked = (Question(f"What is the code of {place}?", code) for place, code in both)
        return Document(f"{first} {prose} {last}", tuple(asked))

    return _in_another_order(group, _fitting(group, map(page, _prose(group)), 0))
