"""Where a new donor goes and who makes room for it: device first, the displaced move down to the host, then out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Tier(str, Enum):
    """Memory that holds donors: the arena on the card, or (page-locked) host memory."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Placement:
    """A new donor goes to `tier`. Before its save, `dropped` go and then `demoted` move to the host, each in order."""

    tier: Tier
    demoted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Size:
    """Room of one donor in either tier: tokens of host memory, blocks of the arena."""

    tokens: int
    blocks: int


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """What is left of each capacity; `donors` counts places of both tiers together."""

    tokens: int
    blocks: int
    donors: int


class Candidates:
    """Donors of one tier that may go, the one to go first in front; those taken in vain are put back."""

    def __init__(self, donors: Iterable[tuple[str, Size]]) -> None:
        self._donors: Iterator[tuple[str, Size]] = iter(donors)
        self._returned: list[tuple[str, Size]] = []

    def next(self) -> tuple[str, Size] | None:
        return self._returned.pop() if self._returned else next(self._donors, None)

    def take_tokens(self, missing: int) -> list[tuple[str, Size]] | None:
        """The next donors that hold `missing` tokens together; None, and nothing is taken, when all do not."""
        taken: list[tuple[str, Size]] = []
        while missing > 0:
            candidate = self.next()
            if candidate is None:
                self._returned.extend(reversed(taken))
                return None
            taken.append(candidate)
            missing -= candidate[1].tokens
        return taken


def place_on_host(size: Size, free: FreeRoom, host: Candidates, device: Candidates) -> Placement | None:
    """Placement of a donor in host memory; None when the candidates do not make enough room."""
    taken = host.take_tokens(size.tokens - free.tokens)
    if taken is None:
        return None
    dropped = [donor_id for donor_id, _ in taken]
    if not _make_places(free, [], dropped, host, device):
        return None
    return Placement(Tier.HOST, (), tuple(dropped))


def place_on_device(size: Size, free: FreeRoom, host: Candidates, device: Candidates) -> Placement | None:
    """Placement of a donor in the arena; None when the candidates do not make enough room.

    The displaced move down, the one used last having the first claim on host memory; those that do not fit there are
    dropped.
    """
    displaced: list[tuple[str, Size]] = []
    blocks = free.blocks
    while blocks < size.blocks:
        candidate = device.next()
        if candidate is None:
            return None
        displaced.append(candidate)
        blocks += candidate[1].blocks
    demoted, dropped = _move_down(displaced, free.tokens, host)
    if not _make_places(free, demoted, dropped, host, device):
        return None
    return Placement(Tier.DEVICE, tuple(demoted), tuple(dropped))


def _move_down(displaced: list[tuple[str, Size]], free_tokens: int, host: Candidates) -> tuple[list[str], list[str]]:
    """Returns who of `displaced` finds room on the host, and who is dropped for that or because there is none."""
    demoted: list[str] = []
    dropped: list[str] = []
    for donor_id, size in reversed(displaced):
        taken = host.take_tokens(size.tokens - free_tokens)
        if taken is None:
            dropped.append(donor_id)
            continue
        dropped += [victim for victim, _ in taken]
        free_tokens += sum(victim.tokens for _, victim in taken) - size.tokens
        demoted.insert(0, donor_id)
    return demoted, dropped


def _make_places(free: FreeRoom, demoted: list[str], dropped: list[str], host: Candidates, device: Candidates) -> bool:
    """Adds to `dropped` until one more donor may be held: the host's first, then those on their way down, then the
    device's."""
    while free.donors + len(dropped) < 1:
        candidate = host.next()
        if candidate is None and demoted:
            dropped.append(demoted.pop(0))
            continue
        candidate = candidate or device.next()
        if candidate is None:
            return False
        dropped.append(candidate[0])
    return True
