"""EvictionPolicy: the interface of all policies, and what they know of a donor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from semblend_trt.donors.block_kind import UNREAD, KindMix

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class DonorHistory:
    """One donor's past, the same in whichever tier it is; the catalog keeps it.

    `added` and `last_use` are ticks of one counter (adding is a use as well), `last_seconds` is the time of the last
    use by the catalog's clock, `uses` counts uses after the first. `text` names the donor's text, empty where unknown.
    """

    tokens: int
    added: int = 0
    last_use: int = 0
    last_seconds: float = 0.0
    uses: int = 0
    text: bytes = b""
    kinds: KindMix = field(default_factory=lambda: UNREAD)


class EvictionPolicy(Protocol):
    """Names the donors of one tier in the order in which they should go. Few calls look at all of them.

    Not thread safe: the catalog calls it under its own lock, and changes nothing while it walks `candidates`.
    """

    def added(self, donor_id: str, history: DonorHistory) -> None:
        """The donor is ready in this tier from now on; it may have been in another before."""

    def used(self, donor_id: str) -> None:
        """The donor was leased, or its text was asked for again; its history says so already."""

    def described(self, donor_id: str) -> None:
        """The donor's kinds have become known; its history says so already."""

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        """The donor has left this tier; `evicted` when it had to make room."""

    def candidates(self) -> Iterator[str]:
        """Donors, the one to go first in front."""
        ...
