"""Families over public evaluation sets: the donor holds a text's passages in another order."""

import functools
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, AliasPath, BaseModel, Field

from semblend_trt.errors import ConfigurationError
from validation.cases import Case, Expectation, Form, content_of, parsed
from validation.documents import Question
from validation.families.group import Group

_Text = Annotated[str, Field(min_length=1)]
_WRONG = "{} is not of the expected form"
_PASSAGE_CHARACTERS = 900
_TEXTS_TOGETHER = 40
_SENTENCE = re.compile(r"(?<=[.!?\"])\s+")


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as `passages`. `questions[i]` are on passage i, `general` on the whole text."""

    passages: tuple[str, ...]
    questions: tuple[tuple[Question, ...], ...]
    general: tuple[Question, ...] = ()


class _SquadQuestion(BaseModel):
    question: _Text
    answer: Annotated[_Text, Field(validation_alias=AliasPath("answers", 0, "text"))]


class _SquadParagraph(BaseModel):
    context: _Text
    qas: list[_SquadQuestion]


class _SquadArticle(BaseModel):
    paragraphs: list[_SquadParagraph]


class _Squad(BaseModel):
    data: list[_SquadArticle]


class _Turn(BaseModel):
    speaker: str
    content: str


class _Query(BaseModel):
    query: _Text
    answer: _Text
    relevant_text_span: list[tuple[int, int]] = []

    def stripped(self) -> Question:
        return Question(self.query.strip(), self.answer.strip())


class _Meeting(BaseModel):
    meeting_transcripts: Annotated[list[_Turn], Field(min_length=1)]
    specific_query_list: list[_Query]
    general_query_list: list[_Query] = []


class _StoryQuestion(BaseModel):
    question_text: _Text
    response: Annotated[_Text, Field(validation_alias=AliasPath("responses", 0, "response_text"))]


class _Story(BaseModel):
    document: _Text
    questions: list[_StoryQuestion]


class _Summarised(BaseModel):
    text: Annotated[_Text, Field(validation_alias=AliasChoices("document", "dialogue"))]
    # DialogSum's test set has three summaries of a dialogue, the other sets have one.
    summary: Annotated[_Text, Field(validation_alias=AliasChoices("summary", "summary1"))]


@functools.cache
def squad_texts(folder: Path) -> tuple[Reading, ...]:
    """Return SQuAD v1.1 (`squad-dev-v1.1.json`), one reading an article, one passage a paragraph. First answers are
    references. Raises ConfigurationError, as the others here do, if the file is unreadable or has another form."""
    readings = []
    for article in _read(_Squad, folder / "squad-dev-v1.1.json").data:
        passages = tuple(each.context.strip() for each in article.paragraphs)
        asked = (each.qas for each in article.paragraphs)
        questions = (tuple(Question(each.question.strip(), each.answer) for each in own) for own in asked)
        readings.append(Reading(passages, tuple(questions)))
    return tuple(readings)


@functools.cache
def qmsum_texts(folder: Path) -> tuple[Reading, ...]:
    """Return QMSum (`qmsum/*.json`), one reading a meeting; a query belongs to the passage where its answer begins."""
    paths = sorted((folder / "qmsum").glob("*.json"))
    if not paths:
        raise ConfigurationError(
            f"{folder / 'qmsum'} holds no meeting; put QMSum's test meetings there, one JSON each."
        )
    readings = []
    for meeting in (_read(_Meeting, path) for path in paths):
        turns = [f"{turn.speaker}: {' '.join(turn.content.split())}" for turn in meeting.meeting_transcripts]
        gathered = list(_gathered(turns))
        starts = list(itertools.accumulate(map(len, gathered), initial=0))[:-1]
        questions: list[list[Question]] = [[] for _ in gathered]
        for each in meeting.specific_query_list:
            first = max(0, min((begin for begin, _ in each.relevant_text_span), default=0))
            questions[bisect_right(starts, first) - 1].append(each.stripped())
        general = tuple(each.stripped() for each in meeting.general_query_list)
        readings.append(Reading(tuple(map("\n".join, gathered)), tuple(map(tuple, questions)), general))
    return tuple(readings)


@functools.cache
def squality_texts(folder: Path) -> tuple[Reading, ...]:
    """Return SQuALITY (`squality-dev.jsonl`), one reading a story; a question's first response is its reference."""
    readings = []
    for story in _lines(_Story, folder / "squality-dev.jsonl"):
        general = tuple(Question(each.question_text, each.response) for each in story.questions)
        passages = tuple(map(" ".join, _gathered(_SENTENCE.split(" ".join(story.document.split())))))
        readings.append(Reading(passages, ((),) * len(passages), general))
    return tuple(readings)


@functools.cache
def summarised_texts(name: str, noun: str, folder: Path) -> tuple[Reading, ...]:
    """Return the texts of all files `{name}*.jsonl`, numbered, _TEXTS_TOGETHER a reading. A passage is a text's first
    whole lines, of about _PASSAGE_CHARACTERS, and its question asks for the summary."""
    paths = sorted(folder.glob(f"{name}*.jsonl"))
    if not paths:
        raise ConfigurationError(f"{folder} holds no {name}*.jsonl; put the published file there.")
    texts = [each for path in paths for each in _lines(_Summarised, path)]
    readings = []
    for start in range(0, len(texts), _TEXTS_TOGETHER):
        passages, questions = [], []
        for number, each in enumerate(texts[start : start + _TEXTS_TOGETHER], start=1):
            shown = next(_gathered(filter(str.strip, each.text.splitlines())), [])
            passages.append("\n".join([f"{noun} {number}", *shown]))
            questions.append((Question(f"Summarise {noun.lower()} {number} in one sentence.", each.summary.strip()),))
        readings.append(Reading(tuple(passages), tuple(questions)))
    return tuple(readings)


def _read(form: type[Form], path: Path) -> Form:
    return parsed(form, content_of(path), _WRONG.format(path))


def _lines(form: type[Form], path: Path) -> Iterator[Form]:
    return (parsed(form, line, _WRONG.format(path)) for line in content_of(path).splitlines() if line.strip())


def _gathered(parts: Iterable[str]) -> Iterator[list[str]]:
    """Yield neighbouring parts together, about _PASSAGE_CHARACTERS long."""
    held: list[str] = []
    for part in parts:
        if held and sum(map(len, held)) + len(part) > _PASSAGE_CHARACTERS:
            yield held
            held = []
        held.append(part)
    if held:
        yield held


def passages(
    read: Callable[[Path], tuple[Reading, ...]], group: Group, *, known: bool = False, elsewhere: bool = False
) -> list[Case]:
    """Return questions on a part of a text, and with `elsewhere` on its other parts too. `known`: only the reference is
    right. Raises ConfigurationError if no text has enough questions."""
    texts, rng, form = read(group.eval_data), group.rng, group.form
    earlier, opening = group.openings()
    for text in rng.sample(texts, len(texts)):
        shown, own = _part(group, text)
        own = rng.sample(own, len(own))
        others = [*text.general, *itertools.chain(*text.questions)] if elsewhere else []
        rng.shuffle(others)
        different = {question.text: question for question in (*own, *others)}
        questions = list(different.values())[: group.questions]
        if shown and len(questions) == group.questions:
            asked = [replace(each, text=form.render(opening, shown, each.text)) for each in questions]
            # There are at least two passages, which the donor holds in another order.
            mixed = rng.sample(shown, len(shown))
            before = mixed if mixed != shown else [*mixed[1:], mixed[0]]
            return group.cases([form.render_pages(earlier, before)], asked, Expectation.REUSE, known)
    raise ConfigurationError(
        f"No text of {group.family} answers {group.questions} questions in {group.tokens} tokens; "
        "ask fewer questions a group or for longer prompts."
    )


def _part(group: Group, text: Reading) -> tuple[list[str], list[Question]]:
    """Return neighbouring passages around a random one that fill the group's room, and the questions on them."""
    # A question on a whole text is longer than those on our own lists.
    asked = itertools.chain(*text.questions, text.general)
    room = group.room - max((group.count(each.text) for each in asked), default=0)
    lengths = [group.length(passage) for passage in text.passages]
    first = last = group.rng.randrange(len(lengths))
    room -= lengths[first]
    while last + 1 < len(lengths) and lengths[last + 1] <= room:
        last += 1
        room -= lengths[last]
    while first > 0 and lengths[first - 1] <= room:
        first -= 1
        room -= lengths[first]
    if room < 0 or first == last:
        return [], []
    return list(text.passages[first : last + 1]), list(itertools.chain(*text.questions[first : last + 1]))
