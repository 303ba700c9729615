"""A case: donors that are served first, a prompt, and what is known about its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Expectation(str, Enum):
    """What a correct system does with a case: place donor KV, nothing, keep the exact prefix, or unknown to us."""

    REUSE = "reuse"
    NONE = "none"
    EXACT_PREFIX = "exact_prefix"
    ANY = "any"

    @property
    def may_reuse(self) -> bool:
        return self in (Expectation.REUSE, Expectation.ANY)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt. Cases of one `group` share their donors; the first of them is the one whose TTFT counts.

    The others ask further questions on the same documents, so that answers are compared on more than one question.
    `known_answer` says that `reference` is the only right answer, not one of many continuations. `donor_answer` is
    the wrong answer that the donors' text gives to the same question, None where it gives none.
    """

    id: str
    workload: str
    size: str
    donors: tuple[str, ...]
    prompt: str
    reference: str | None
    known_answer: bool
    expects: Expectation
    group: str
    donor_answer: str | None = None

    @property
    def is_timed(self) -> bool:
        return self.id == self.group


def groups(cases: list[Case]) -> list[list[Case]]:
    """Cases by group, in the order in which the groups first appear."""
    by_group: dict[str, list[Case]] = {}
    for case in cases:
        by_group.setdefault(case.group, []).append(case)
    return list(by_group.values())
