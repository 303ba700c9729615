"""A neighbour of a request, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A held donor whose text is near a request's; `similarity` is the cosine of their vectors."""

    donor_id: str
    similarity: float


class Listener(Protocol):
    """Hears of what the thread did, on that thread."""

    def neighbours_found(self, request_id: int, nearest: tuple[Neighbour, ...]) -> None:
        """The nearest donors of a request, the nearest first; none where none is near enough."""
        ...

    def neighbours_counted(self, event: str) -> None:
        """Counts one event, one of EVENTS."""
        ...


# What became of a text: entered, searched for, not taken because too many waited, or not embedded for an error.
EVENTS = ("donor_embedded", "request_embedded", "dropped", "failed")
