"""A neighbour of a request, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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

    def donor_embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        """A held donor's vector, float32 [dim] of unit length, which nobody changes."""
        ...

    def neighbours_counted(self, event: str) -> None:
        """Counts one event, one of EVENTS."""
        ...


# What became of a text: entered, searched for, not taken because too many waited, or not embedded for an error.
EVENTS = ("donor_embedded", "request_embedded", "dropped", "failed")
