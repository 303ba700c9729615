"""One group of cases: its random source, its length, and how its documents and questions become cases."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, zip_longest
from pathlib import Path

from semblend_trt.errors import ConfigurationError
from validation.cases import Case, Expectation
from validation.documents import Document, Question, counted_list
from validation.prompts import PromptForm, Turn

# Room for the longest question beside opening and documents.
_QUESTION_TOKENS = 40
_SMALLEST_ROOM = 160


@dataclass(frozen=True, slots=True)
class Group:
    """What one group of a family is written from; equal groups write equal cases. `count` gives the number of a text's
    tokens. Prompts and donors have at most `tokens` tokens. `expects`: what a correct system does with its cases."""

    family: str
    name: str
    form: PromptForm
    count: Callable[[str], int]
    rng: random.Random
    questions: int
    tokens: int
    eval_data: Path
    expects: Expectation

    @property
    def room(self) -> int:
        """Tokens for documents. Raises ConfigurationError when too few are left beside the longest opening."""
        least = least_tokens(self.form, self.count)
        room = self.tokens - least + _SMALLEST_ROOM
        if room < _SMALLEST_ROOM:
            raise ConfigurationError(
                f"Prompts of {self.tokens} tokens leave {max(room, 0)} for documents; ask for at least {least} tokens."
            )
        return room

    def length(self, document: str) -> int:
        """Return the tokens of a document with the mark before it."""
        return self.count(self.form.render_pages("", [document])) - self.count(self.form.render_pages("", []))

    def openings(self, source: tuple[str, ...] | None = None) -> tuple[str, str]:
        """Return the donor's and the prompt's opening, of different length, so that what follows them is shifted."""
        while True:
            earlier, opening = self.rng.sample(source or self.form.instructions, 2)
            if self.count(earlier) != self.count(opening):
                return earlier, opening

    def places(self) -> Iterator[str]:
        """Yield different places. Raises ConfigurationError when the form has no more."""
        words, taken = self.form.vocabulary, set[str]()
        limit = len(words.place_kinds) * len(words.place_names)
        while len(taken) < limit:
            place = f"{self.rng.choice(words.place_kinds)} {self.rng.choice(words.place_names)}"
            if place not in taken:
                taken.add(place)
                yield place
        raise ConfigurationError(f"The prompt form {self.form.name} has {limit} places, too few for one prompt.")

    def items(self, rows_between: int = 0) -> list[str]:
        """Return the items of one list of the form's length, and `rows_between` more for each of two lists."""
        rows = self.rng.randint(*self.form.rows)
        return self.rng.sample(self.form.vocabulary.items, rows + 2 * rows_between)

    def counts(self, items: Sequence[str], unlike: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return a random count for each item, different from its count in `unlike`."""
        words, counts = self.form.vocabulary, dict[str, int]()
        for item in items:
            while item not in counts or (unlike is not None and counts[item] == unlike.get(item)):
                counts[item] = self.rng.randint(words.least, words.most)
        return counts

    def fitting(self, source: Iterable[Document], room: int, extra: int = 0) -> list[Document]:
        """Return at least two documents that fill `room` tokens, `extra` tokens beside each."""
        shown, used = list[Document](), 0
        for document in source:
            used += self.length(document.text) + extra
            if used > room and len(shown) > 1:
                break
            shown.append(document)
        return shown

    def stock_lists(self, room: int, extra: int = 0, places: Iterator[str] | None = None) -> list[Document]:
        """Return `fitting` stock lists of different places."""
        lists = (counted_list(place, self.counts(self.items())) for place in places or self.places())
        return self.fitting(lists, room, extra)

    def look_ups(self, before: "Side", last: Question, after: "Side", questions: Sequence[Question]) -> list[Case]:
        """Return cases that ask `questions` on `after`; their one donor asks `last` on `before`."""
        asked = [replace(each, text=after.prompt(self.form, each)) for each in questions]
        return self.cases([before.prompt(self.form, last)], asked)

    def cases(self, donors: Sequence[str], asked: Sequence[Question], known: bool = True) -> list[Case]:
        """Return the cases of this group, of prompts with their answers; the first of them is the timed one."""
        return [
            Case(
                id=self.name if index == 0 else f"{self.name}-question-{index}",
                workload=self.family,
                size=str(self.tokens),
                donors=tuple(donors),
                prompt=each.text,
                reference=each.answer,
                known_answer=known,
                expects=self.expects,
                group=self.name,
                donor_answer=each.donor_answer,
            )
            for index, each in enumerate(asked)
        ]


@dataclass(frozen=True, slots=True)
class Side:
    """What a prompt, or its donor, shows before the question; the documents are in the last turn."""

    opening: str
    documents: Sequence[Document]
    turns: Sequence[Turn] = ()

    def prompt(self, form: PromptForm, asked: Question) -> str:
        return form.render_conversation(self.opening, self.turns, asked.text, [each.text for each in self.documents])


@lru_cache(maxsize=1)  # every group asks
def least_tokens(form: PromptForm, count: Callable[[str], int]) -> int:
    """Return the tokens of the shortest prompts that a family can be written in."""
    openings = {*form.instructions, *form.system_prompts}
    return max(count(form.render(each, [], "")) for each in openings) + _QUESTION_TOKENS + _SMALLEST_ROOM


def ask(rng: random.Random, shown: Sequence[Document], count: int) -> list[Question]:
    """Return `count` different questions, from different documents if there are enough. Raises ConfigurationError."""
    pools = [rng.sample(document.questions, len(document.questions)) for document in shown]
    rng.shuffle(pools)
    if count > sum(map(len, pools)):
        raise ConfigurationError(
            f"The documents of one group answer {sum(map(len, pools))} questions, but {count} are needed; "
            "ask fewer questions a group or for longer prompts."
        )
    in_turns = chain.from_iterable(zip_longest(*map(reversed, pools)))
    return list(islice(filter(None, in_turns), count))


def turns_of(rng: random.Random, shown: Sequence[Document]) -> list[Turn]:
    """Return a turn of a conversation for each document: the document, a question on it, and the answer."""
    asked = [rng.choice(document.questions) for document in shown]
    return [Turn(each.text, each.answer, (document.text,)) for document, each in zip(shown, asked, strict=True)]
