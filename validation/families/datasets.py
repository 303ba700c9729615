"""Families over public evaluation sets: the donor holds a text's passages in another order."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field

from semblend_trt.errors import ConfigurationError
from validation.cases import Expectation, Form, content_of, parsed
from validation.documents import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from validation.cases import Case
    from validation.families.group import Group

_Text = Annotated[str, Field(min_length=1)]
_WRONG = "{} is not of the expected form"
_PASSAGE_CHARACTERS = 900
_SENTENCE = re.compile(r"(?<=[.!?\"])\s+")


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as `passages`. `questions[i]` are on passage i, `general` on the whole text."""

    passages: tuple[str, ...]
    questions: tuple[tuple[Question, ...], ...]
    general: tuple[Question, ...] = ()


class _SquadAnswer(BaseModel):
    text: _Text


class _SquadQuestion(BaseModel):
    question: _Text
    answers: Annotated[list[_SquadAnswer], Field(min_length=1)]


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


class _Meeting(BaseModel):
    meeting_transcripts: list[_Turn]
    specific_query_list: list[_Query]
    general_query_list: list[_Query] = []


class _Response(BaseModel):
    response_text: _Text


class _StoryQuestion(BaseModel):
    question_text: _Text
    responses: Annotated[list[_Response], Field(min_length=1)]


class _Story(BaseModel):
    document: _Text
    questions: list[_StoryQuestion]


@functools.cache
def squad_texts(folder: Path) -> tuple[Reading, ...]:
    """SQuAD v1.1, one reading an article, one passage a paragraph; the first answer of a question is its reference.

    Raises ConfigurationError when the file cannot be read or is not of that form, as the others here do.
    """
    articles = _read(_Squad, folder / "squad-dev-v1.1.json").data
    return tuple(
        Reading(
            tuple(paragraph.context.strip() for paragraph in article.paragraphs),
            tuple(
                tuple(Question(each.question.strip(), each.answers[0].text) for each in paragraph.qas)
                for paragraph in article.paragraphs
            ),
        )
        for article in articles
    )


@functools.cache
def qmsum_texts(folder: Path) -> tuple[Reading, ...]:
    """QMSum, one reading a meeting; a query belongs to the passage in which the text that answers it begins."""
    paths = sorted((folder / "qmsum").glob("*.json"))
    if not paths:
        raise ConfigurationError(
            f"{folder / 'qmsum'} holds no meeting; put QMSum's test meetings there, one JSON each."
        )
    return tuple(_meeting(_read(_Meeting, path)) for path in paths)


@functools.cache
def squality_texts(folder: Path) -> tuple[Reading, ...]:
    """SQuALITY, one reading a story; every question is on the whole of it, its first response is the reference."""
    path = folder / "squality-dev.jsonl"
    lines = [line for line in content_of(path).splitlines() if line.strip()]
    stories = [parsed(_Story, line, _WRONG.format(path)) for line in lines]
    readings = []
    for story in stories:
        sentences = _SENTENCE.split(" ".join(story.document.split()))
        general = tuple(Question(each.question_text, each.responses[0].response_text) for each in story.questions)
        passages = tuple(" ".join(each) for each in _gathered(sentences))
        readings.append(Reading(passages, ((),) * len(passages), general))
    return tuple(readings)


def _read(form: type[Form], path: Path) -> Form:
    return parsed(form, content_of(path), _WRONG.format(path))


def _meeting(meeting: _Meeting) -> Reading:
    turns = [f"{turn.speaker}: {' '.join(turn.content.split())}" for turn in meeting.meeting_transcripts]
    gathered = list(_gathered(turns))
    starts = [sum(map(len, gathered[:index])) for index in range(len(gathered))]
    questions: list[list[Question]] = [[] for _ in gathered]
    for each in meeting.specific_query_list:
        first = min((begin for begin, _ in each.relevant_text_span), default=0)
        owner = max(index for index, start in enumerate(starts) if start <= max(first, 0))
        questions[owner].append(Question(each.query.strip(), each.answer.strip()))
    general = tuple(Question(each.query.strip(), each.answer.strip()) for each in meeting.general_query_list)
    return Reading(tuple("\n".join(each) for each in gathered), tuple(map(tuple, questions)), general)


def _gathered(parts: Iterable[str]) -> Iterable[list[str]]:
    """Neighbouring parts together, about _PASSAGE_CHARACTERS long."""
    held: list[str] = []
    for part in parts:
        if held and sum(map(len, held)) + len(part) > _PASSAGE_CHARACTERS:
            yield held
            held = []
        held.append(part)
    if held:
        yield held


def squad(group: Group) -> list[Case]:
    """SQuAD v1.1 (`squad-dev-v1.1.json`); the first answer is the reference."""
    return _passages(group, squad_texts, known=True)


def qmsum(group: Group) -> list[Case]:
    """QMSum (`qmsum/*.json`): part of a meeting; the answer to a query on the meeting is the reference."""
    return _passages(group, qmsum_texts, known=False)


def squality(group: Group) -> list[Case]:
    """SQuALITY (`squality-dev.jsonl`): part of a story; the first response to a question is the reference."""
    return _passages(group, squality_texts, known=False)


def _passages(group: Group, read: Callable[[Path], tuple[Reading, ...]], known: bool) -> list[Case]:
    """Where answers are not `known`, questions may be on other parts of the text too.

    Raises ConfigurationError when no text has enough questions.
    """
    texts, rng, form = read(group.eval_data), group.rng, group.form
    earlier, opening = group.openings()
    for text in rng.sample(texts, len(texts)):
        shown, own = _part(group, text)
        own = rng.sample(own, len(own))
        others = [] if known else [*text.general, *(each for source in text.questions for each in source)]
        rng.shuffle(others)
        questions = _different((*own, *others))[: group.questions]
        if shown and len(questions) == group.questions:
            asked = [replace(each, text=form.render(opening, shown, each.text)) for each in questions]
            donors = [form.render_pages(earlier, _reordered(group, shown))]
            return group.cases(donors, asked, Expectation.REUSE, known)
    raise ConfigurationError(
        f"No text of {group.family} answers {group.questions} questions in {group.tokens} tokens; "
        "ask fewer questions a group or for longer prompts."
    )


def _part(group: Group, text: Reading) -> tuple[list[str], list[Question]]:
    """Neighbouring passages around a random one that fill the group's room, and the questions on them."""
    sources = [*text.questions, text.general]
    # A question on a whole text is longer than those on our own lists.
    room = group.room - max((group.count(each.text) for source in sources for each in source), default=0)
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
    return list(text.passages[first : last + 1]), [
        each for source in text.questions[first : last + 1] for each in source
    ]


def _reordered(group: Group, passages: list[str]) -> list[str]:
    """The passages, of which there are at least two, in another order."""
    mixed = group.rng.sample(passages, len(passages))
    return mixed if mixed != passages else [*mixed[1:], mixed[0]]


def _different(questions: Iterable[Question]) -> list[Question]:
    return list({question.text: question for question in questions}.values())
