"""What the engines are asked: prompts over stock lists, whose answers are numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from validation.documents import Document, stock_list
from validation.prompts import in_plain_text, render

_SHORT = "Answer with a number only."
_LONG = "Read the lists, then give the number that is asked for, and nothing else."


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt and the right answer. The others of its group hold the same documents in another order."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Workload:
    """`targets` hold the documents of `donors` at other places; they are asked twice."""

    donors: tuple[Trial, ...]
    targets: tuple[Trial, ...]

    @property
    def prompts(self) -> list[str]:
        return [trial.prompt for trial in (*self.donors, *self.targets, *self.targets)]


def workload(groups: int, rows: int, seed: int = 0) -> Workload:
    """Stock lists, four a prompt, under one instruction as donors and reversed under another as targets."""
    rng = random.Random(seed)
    donors: list[Trial] = []
    targets: list[Trial] = []
    for _ in range(groups):
        lists = [stock_list(rng, rows=rows) for _ in range(4)]
        donors.append(_trial(rng, _SHORT, lists))
        targets.append(_trial(rng, _LONG, lists[::-1]))
    return Workload(tuple(donors), tuple(targets))


def crowd(rounds: int, beginnings: int, rows: int, seed: int = 1) -> tuple[tuple[str, ...], ...]:
    """Rounds of prompts that are asked at once: two of each of the `beginnings`, next to each other.

    Prompts of one beginning share instruction and lists, and neighbouring beginnings share a list.
    """
    rng = random.Random(seed)
    lists = [stock_list(rng, rows=rows) for _ in range(beginnings + 1)]
    pairs = [[lists[index], lists[index + 1]] for index in range(beginnings)]
    return tuple(tuple(_trial(rng, _SHORT, pair).prompt for pair in pairs for _ in range(2)) for _ in range(rounds))


def _trial(rng: random.Random, instruction: str, lists: list[Document]) -> Trial:
    question = rng.choice(rng.choice(lists).questions)
    prompt = render(instruction, [each.text for each in lists], question.text)
    return Trial(in_plain_text(prompt), question.answer)
