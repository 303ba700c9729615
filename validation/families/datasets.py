"""Families over public evaluation sets, read from a folder that the user names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from validation.cases import Case
    from validation.families.group import Group


def squad(group: Group) -> list[Case]:
    """SQuAD v1.1 (`squad-dev-v1.1.json`): paragraphs in another order; the first answer is the reference."""
    raise NotImplementedError


def qmsum(group: Group) -> list[Case]:
    """QMSum (`qmsum/*.json`): a meeting in pieces; the answer to a query is the reference."""
    raise NotImplementedError


def squality(group: Group) -> list[Case]:
    """SQuALITY (`squality-dev.jsonl`): a story in pieces; the first response is the reference."""
    raise NotImplementedError
