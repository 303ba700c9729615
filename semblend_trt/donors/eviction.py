"""Which donor goes first when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class EvictionPolicy(Protocol):
    """Told of every donor that may be dropped, names them in the order in which they should go.

    Not thread safe: the catalog calls it under its own lock.
    """

    def added(self, donor_id: str) -> None:
        """The donor is ready from now on."""

    def used(self, donor_id: str) -> None:
        """The donor was leased, or its text was asked for again."""

    def removed(self, donor_id: str) -> None:
        """The donor is gone."""

    def candidates(self) -> Iterator[str]:
        """Donors, the one to drop first in front."""
        ...


class LruEviction:
    """Least recently used first; a donor counts as used when it is added."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def added(self, donor_id: str) -> None:
        self._order[donor_id] = None
        self._order.move_to_end(donor_id)

    def used(self, donor_id: str) -> None:
        self._order.move_to_end(donor_id)

    def removed(self, donor_id: str) -> None:
        self._order.pop(donor_id, None)

    def candidates(self) -> Iterator[str]:
        return iter(self._order)
