"""Seeded documents with questions that their text answers: stock lists, fact sheets and public-domain prose."""

import functools
import importlib.resources
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@functools.cache
def _asset(name: str) -> str:
    return (importlib.resources.files("validation") / "assets" / name).read_text(encoding="utf-8").strip()


# Words and sentences by their heading.
WORDS = dict(part.split(":\n", 1) for part in _asset("words.txt").split("\n\n"))
_PLACE_KINDS, _CITIES, _ITEMS = words(WORDS["place kinds"]), words(WORDS["cities"]), words(WORDS["items"])
_NAME_STEMS, _NAME_ENDINGS = words(WORDS["name stems"]), words(WORDS["name endings"])
_FIRST_NAMES, _LAST_NAMES = words(WORDS["first names"]), words(WORDS["last names"])
_TRADES = words(WORDS["trades"])
# The second yardstick knows lists by these names only.
LIST_NAMES = words(WORDS["list names"])
_SENTENCE_START = re.compile(r'(?<=[.!?"])\s+(?=["A-Z])')
_SENTENCE_END = re.compile(r'[.!?]"?(?=\s|$)')


@dataclass(frozen=True, slots=True)
class Question:
    """A question, or a prompt that ends with one, and its right answer; `donor_answer` is a donor's wrong one."""

    text: str
    answer: str
    donor_answer: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A text for a prompt and the questions that it answers, in the order of the text."""

    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What stock lists speak of: places of two words, items, and counts between `least` and `most`."""

    place_kinds: tuple[str, ...]
    place_names: tuple[str, ...]
    items: tuple[str, ...]
    least: int = 2
    most: int = 999


SHIPPED_VOCABULARY = Vocabulary(
    _PLACE_KINDS, (*_CITIES, *(stem + ending for stem in _NAME_STEMS for ending in _NAME_ENDINGS)), _ITEMS
)


def place_name(rng: random.Random) -> str:
    """Return one of about 36,000 places, such as `Depot Oslo`."""
    kind = rng.choice(_PLACE_KINDS)
    if rng.random() < 0.1:
        return f"{kind} {rng.choice(_CITIES)}"
    return f"{kind} {rng.choice(_NAME_STEMS)}{rng.choice(_NAME_ENDINGS)}"


def stock_list(rng: random.Random, rows: int = 8, place: str | None = None) -> Document:
    """Return a list of `rows` different items with their counts (2 to 999) at `place`, or at a random place."""
    items = rng.sample(_ITEMS, rows)
    return counted_list(place or place_name(rng), {item: rng.randint(2, 999) for item in items})


def counted_list(place: str, counts: Mapping[str, int]) -> Document:
    """Return the stock list of `place` with these counts, one row an item, in their order."""
    rows = "\n".join(f"{item}: {count}" for item, count in counts.items())
    questions = (Question(f"How many {item} are in {place}?", str(count)) for item, count in counts.items())
    return Document(f"Stock list of {place}.\n{rows}", tuple(questions))


def named_list(name: str, place: str, counts: Mapping[str, int]) -> Document:
    """Return a list that does not name its place; a `register` says that it belongs to `place`."""
    known = counted_list(place, counts)
    rows = known.text.partition("\n")[2]
    return Document(f"List {name}.\n{rows}", known.questions)


def register(places: Mapping[str, str]) -> Document:
    """Return which place each list belongs to, by the list's name."""
    lines = (f"List {name} belongs to {place}." for name, place in places.items())
    return Document("\n".join(("Register of lists.", *lines)), ())


def names(rng: random.Random, count: int) -> list[str]:
    """Return the names of `count` different people."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}"] = None
    return list(found)


def biographies(rng: random.Random, count: int) -> list[Document]:
    """Return sentences on `count` people in any order; the questions: badge number, city, trade and year of birth."""
    found = []
    for name in names(rng, count):
        badge, year = str(rng.randint(1000, 9999)), str(rng.randint(1940, 2005))
        city, trade = rng.choice(_CITIES), rng.choice(_TRADES)
        sentences = [
            rng.choice((f"The badge number of {name} is {badge}.", f"{name} has badge {badge}.")),
            rng.choice((f"{name} lives in {city}.", f"The home of {name} is in {city}.")),
            rng.choice((f"{name} is registered as {trade}.", f"The trade of {name} is {trade}.")),
            rng.choice((f"{name} was born in {year}.", f"The year of birth of {name} is {year}.")),
        ]
        rng.shuffle(sentences)
        questions = (
            Question(f"What is the badge number of {name}?", badge),
            Question(f"Where does {name} live?", city),
            Question(f"What is the trade of {name}?", trade),
            Question(f"In which year was {name} born?", year),
        )
        found.append(Document(" ".join(sentences), questions))
    return found


def name_of(person: Document) -> str:
    """Return whom one of the `biographies` is on."""
    return person.questions[1].text.removeprefix("Where does ").removesuffix(" live?")


def records(rng: random.Random, count: int) -> Iterator[Document]:
    """Yield records of `count` people. Only the first line of a record names its person."""
    for person in biographies(rng, count):
        badge, city, trade, year = (question.answer for question in person.questions)
        text = (
            f"{name_of(person)}\nThe badge number is {badge}. The holder of the badge works as a {trade} and lives in "
            f"{city}. The holder was born in {year}, and has worked for the company for many years. The badge opens "
            f"the doors of the building in {city} and has to be shown at the gate every morning. A lost badge must be "
            "reported to the office on the same day."
        )
        yield Document(text, person.questions)


def renamed(document: Document, old: str, new: str) -> Document:
    """Return the document and its questions with another name."""
    questions = (replace(each, text=each.text.replace(old, new)) for each in document.questions)
    return Document(document.text.replace(old, new), tuple(questions))


def desks(numbers: Sequence[int], owners: Sequence[Document]) -> Document:
    """Return which of the `biographies`' people each desk belongs to; questions ask where a desk's owner lives."""
    lines, questions = ["Register of desks."], list[Question]()
    for number, owner in zip(numbers, owners, strict=True):
        lines.append(f"Desk {number} belongs to {name_of(owner)}.")
        questions.append(Question(f"Where does the owner of desk {number} live?", owner.questions[1].answer))
    return Document("\n".join(lines), tuple(questions))


def excerpt(rng: random.Random, characters: int) -> str:
    """Return whole sentences of the shipped public-domain prose, at most `characters` long, but at least one."""
    prose = _asset("excerpt.txt")
    found = _SENTENCE_START.search(prose, rng.randrange(max(1, len(prose) - characters - 1000)))
    start = found.end() if found else 0
    end = None
    for sentence in _SENTENCE_END.finditer(prose, start):
        if end is not None and sentence.end() > start + characters:
            break
        end = sentence.end()
    return prose[start:end]
