"""Families over public evaluation sets: a text in pieces, served before in another order under another instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation.cases import Expectation
from validation.families import readings
from validation.families.group import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from validation.cases import Case
    from validation.documents import Question
    from validation.families.group import Group
    from validation.families.readings import Reading


def squad(group: Group) -> list[Case]:
    """SQuAD v1.1 (`squad-dev-v1.1.json`); the first answer is the reference."""
    return _pieces(group, readings.squad, known=True)


def qmsum(group: Group) -> list[Case]:
    """QMSum (`qmsum/*.json`): part of a meeting; the answer to a query on the meeting is the reference."""
    return _pieces(group, readings.qmsum, known=False)


def squality(group: Group) -> list[Case]:
    """SQuALITY (`squality-dev.jsonl`): part of a story; the first response to a question is the reference."""
    return _pieces(group, readings.squality, known=False)


def _pieces(group: Group, read: Callable[[Path], tuple[Reading, ...]], known: bool) -> list[Case]:
    """Where answers are not `known`, questions on other parts of the text may be among those asked.

    Raises ConfigurationError when no text has enough questions.
    """
    if group.eval_data is None:
        raise ConfigurationError(f"The family {group.family} needs the folder of evaluation sets.")
    texts, rng, form = read(group.eval_data), group.rng, group.form
    earlier, opening = group.openings()
    for text in rng.sample(texts, len(texts)):
        shown, own = _part(group, text)
        own = rng.sample(own, len(own))
        others = [] if known else [*text.general, *(each for source in text.questions for each in source)]
        rng.shuffle(others)
        questions = _different((*own, *others))[: group.questions]
        if shown and len(questions) == group.questions:
            asked = [Asked(form.render(opening, shown, each.text), each.answer) for each in questions]
            donors = [form.render_pages(earlier, _reordered(group, shown))]
            return group.cases(donors, asked, Expectation.REUSE, known)
    raise ConfigurationError(
        f"No text of {group.family} answers {group.questions} questions in {group.tokens} tokens; "
        "ask fewer questions a group or for longer prompts."
    )


def _part(group: Group, text: Reading) -> tuple[list[str], list[Question]]:
    """Neighbouring pieces from a random one on that fill the group's room, and questions: those on them first."""
    sources = [*text.questions, text.general]
    # A question on a whole text is longer than those on our own lists.
    room = group.room - max((group.count(each.text) for source in sources for each in source), default=0)
    lengths = [group.length(piece) for piece in text.pieces]
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
    return list(text.pieces[first : last + 1]), [each for source in text.questions[first : last + 1] for each in source]


def _reordered(group: Group, pieces: list[str]) -> list[str]:
    """The pieces, of which there are at least two, in another order."""
    mixed = group.rng.sample(pieces, len(pieces))
    return mixed if mixed != pieces else [*mixed[1:], mixed[0]]


def _different(questions: Iterable[Question]) -> list[Question]:
    return list({question.text: question for question in questions}.values())
