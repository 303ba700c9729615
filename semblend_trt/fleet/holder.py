"""What a directory answers: who holds a prompt's text, and which workers it follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# (worker_id, dp_rank)
Worker: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker whose donors hold an estimated `tokens` of a prompt's tokens, all its donors taken together."""

    worker: Worker
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker that speaks: how many donors it is known to hold, whether nothing that it said was missed.

    `last_seen_s` are the seconds, of the directory's own clock, since it last said something that was believed.
    """

    worker: Worker
    is_synced: bool
    donors: int
    last_seen_s: float
