"""Families over public evaluation sets: the donor holds a text's passages in another order."""

import functools
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, AliasPath, BaseModel, Field

from semblend_trt.errors import ConfigurationError
from validation.cases import Case, content_of, parsed
from validation.documents import Document, Question
from validation.families.group import Group

_Text = Annotated[str, Field(min_length=1)]
_WRONG = "{} is not of the expected form"
_PASSAGE_CHARACTERS = 900
_TEXTS_TOGETHER = 40
_SENTENCE = re.compile(r"(?<=[.!?\"])\s+")

# A text: its passages, each with the questions on it.
Text = tuple[Document, ...]


class _SquadQuestion(BaseModel):
    question: _Text
    answer: Annotated[_Text, Field(validation_alias=AliasPath("answers", 0, "text"))]


class _SquadParagraph(BaseModel):
    context: _Text
    qas: list[_SquadQuestion]


class _SquadArticle(BaseModel):
    paragraphs: Annotated[list[_SquadParagraph], Field(min_length=1)]


class _Squad(BaseModel):
    data: list[_SquadArticle]


class _Turn(BaseModel):
    speaker: str
    content: str


class _Query(BaseModel):
    query: _Text
    answer: _Text


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
def squad_texts(folder: Path) -> tuple[Text, ...]:
    """Return SQuAD v1.1 (`squad-dev-v1.1.json`), a text an article, a passage a paragraph. First answers are
    references. Raises ConfigurationError, as the others here do, if the file is unreadable or has another form."""
    path = folder / "squad-dev-v1.1.json"
    return tuple(
        tuple(
            Document(each.context.strip(), tuple(Question(qa.question.strip(), qa.answer) for qa in each.qas))
            for each in article.paragraphs
        )
        for article in parsed(_Squad, content_of(path), _WRONG.format(path)).data
    )


@functools.cache
def qmsum_texts(folder: Path) -> tuple[Text, ...]:
    """Return QMSum (`qmsum/*.json`), a text a meeting; every query may be asked on every part of it."""
    meetings = folder / "qmsum"
    paths = sorted(meetings.glob("*.json"))
    if not paths:
        raise ConfigurationError(f"{meetings} holds no meeting; put QMSum's test meetings there, one JSON each.")
    texts = []
    for path in paths:
        meeting = parsed(_Meeting, content_of(path), _WRONG.format(path))
        turns = [f"{turn.speaker}: {' '.join(turn.content.split())}" for turn in meeting.meeting_transcripts]
        asked = (*meeting.specific_query_list, *meeting.general_query_list)
        texts.append(_of_parts(turns, "\n", [Question(each.query.strip(), each.answer.strip()) for each in asked]))
    return tuple(texts)


@functools.cache
def squality_texts(folder: Path) -> tuple[Text, ...]:
    """Return SQuALITY (`squality-dev.jsonl`), a text a story; every question may be asked on every part of it, and its
    first response is its reference."""
    path, texts = folder / "squality-dev.jsonl", []
    for line in filter(bytes.strip, content_of(path).splitlines()):
        story = parsed(_Story, line, _WRONG.format(path))
        sentences = _SENTENCE.split(" ".join(story.document.split()))
        texts.append(_of_parts(sentences, " ", [Question(q.question_text, q.response) for q in story.questions]))
    return tuple(texts)


def _of_parts(parts: Sequence[str], joint: str, questions: Iterable[Question]) -> Text:
    """Return passages of neighbouring parts, about _PASSAGE_CHARACTERS long, each with all the questions."""
    ends, asked = list(itertools.accumulate(map(len, parts))), tuple(questions)
    runs = itertools.groupby(range(len(parts)), lambda index: ends[index] // _PASSAGE_CHARACTERS)
    return tuple(Document(joint.join(parts[index] for index in run), asked) for _, run in runs)


@functools.cache
def summarised_texts(name: str, noun: str, folder: Path) -> tuple[Text, ...]:
    """Return what all files `{name}*.jsonl` hold, numbered, _TEXTS_TOGETHER a text. A passage is the first whole lines
    of one of them, of about _PASSAGE_CHARACTERS, and its question asks for the summary."""
    paths = sorted(folder.glob(f"{name}*.jsonl"))
    if not paths:
        raise ConfigurationError(f"{folder} holds no {name}*.jsonl; put the published file there.")
    lines = ((path, line) for path in paths for line in content_of(path).splitlines() if line.strip())
    passages = []
    for index, (path, line) in enumerate(lines):
        each, number = parsed(_Summarised, line, _WRONG.format(path)), index % _TEXTS_TOGETHER + 1
        said = list(filter(str.strip, each.text.splitlines()))
        shown = said[: max(1, bisect_right(list(itertools.accumulate(map(len, said))), _PASSAGE_CHARACTERS))]
        question = Question(f"Summarise {noun.lower()} {number} in one sentence.", each.summary.strip())
        passages.append(Document("\n".join([f"{noun} {number}", *shown]), (question,)))
    return tuple(tuple(passages[at : at + _TEXTS_TOGETHER]) for at in range(0, len(passages), _TEXTS_TOGETHER))


def passages(read: Callable[[Path], tuple[Text, ...]], group: Group, *, known: bool = False) -> list[Case]:
    """Return questions on neighbouring passages of a text, from a random one on. `known`: only the reference is right.
    Raises ConfigurationError if no text has enough questions."""
    texts, rng, form = read(group.eval_data), group.rng, group.form
    earlier, opening = group.openings()
    for text in rng.sample(texts, len(texts)):
        # A question of a published set may be longer than those on our own lists.
        room = group.room - max((group.count(asked.text) for each in text for asked in each.questions), default=0)
        start = rng.randrange(len(text))
        used = list(itertools.accumulate(group.length(each.text) for each in text[start:]))
        shown = text[start : start + bisect_right(used, room)]
        questions = list(dict.fromkeys(asked for each in shown for asked in each.questions))
        if len(shown) > 1 and len(questions) >= group.questions:
            pages = [each.text for each in shown]
            chosen = rng.sample(questions, group.questions)
            asked = [replace(each, text=form.render(opening, pages, each.text)) for each in chosen]
            mixed = rng.sample(pages, len(pages))
            before = mixed if mixed != pages else [*mixed[1:], mixed[0]]
            return group.cases([form.render_pages(earlier, before)], asked, known)
    raise ConfigurationError(
        f"No text of {group.family} answers {group.questions} questions in {group.tokens} tokens; "
        "ask fewer questions a group or for longer prompts."
    )
