"""Where a new donor goes and who makes room for it: device first, the displaced move down to the host, then out.

A donor that has a file on disk is not lost when it leaves memory: it is released, and may be fetched again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Tier(str, Enum):
    """What holds donors: the arena on the card, (page-locked) host memory, or files. On disk alone none is readable."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Placement:
    """A donor goes to `tier`. Before its bytes move there, `dropped` go, `released` leave memory for their files, and
    then `demoted` move to the host, each in order. `written` of the demoted, and the donor itself where it is named
    there, go on to disk as soon as they are in host memory."""

    tier: Tier
    demoted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Size:
    """Room of one donor: tokens of host memory, blocks of the arena. `has_file`: it stays on disk when it leaves."""

    tokens: int
    blocks: int
    has_file: bool = False


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """What is left of each capacity; `donors` counts places of all tiers together."""

    tokens: int
    blocks: int
    donors: int


Candidate = tuple[str, Size]


class Candidates:
    """Donors of one tier that may go, the one to go first in front; those taken in vain are put back."""

    def __init__(self, donors: Iterable[Candidate] = ()) -> None:
        self._donors: Iterator[Candidate] = iter(donors)
        self._returned: list[Candidate] = []

    def next(self) -> Candidate | None:
        return self._returned.pop() if self._returned else next(self._donors, None)

    def take_tokens(self, missing: int) -> list[Candidate] | None:
        """The next donors that hold `missing` tokens together; None, and nothing is taken, when all do not."""
        taken: list[Candidate] = []
        while missing > 0:
            candidate = self.next()
            if candidate is None:
                self._returned.extend(reversed(taken))
                return None
            taken.append(candidate)
            missing -= candidate[1].tokens
        return taken


@dataclass(frozen=True, slots=True)
class Room:
    """What is free, and who of each tier may make more room."""

    free: FreeRoom
    host: Candidates
    device: Candidates
    disk: Candidates


def place_on_host(size: Size, room: Room) -> Placement | None:
    """Placement of a donor in host memory; None when the candidates do not make enough room."""
    taken = room.host.take_tokens(size.tokens - room.free.tokens)
    if taken is None:
        return None
    return _settled(Tier.HOST, [], taken, room)


def place_on_device(size: Size, room: Room) -> Placement | None:
    """Placement of a donor in the arena; None when the candidates do not make enough room.

    The displaced move down, the one used last having the first claim on host memory; those that do not fit there are
    dropped.
    """
    displaced: list[Candidate] = []
    blocks = room.free.blocks
    while blocks < size.blocks:
        candidate = room.device.next()
        if candidate is None:
            return None
        displaced.append(candidate)
        blocks += candidate[1].blocks
    demoted, leaving = _move_down(displaced, room.free.tokens, room.host)
    return _settled(Tier.DEVICE, demoted, leaving, room)


def _move_down(
    displaced: list[Candidate], free_tokens: int, host: Candidates
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns who of `displaced` finds room on the host, and who leaves memory for that or because there is none."""
    demoted: list[Candidate] = []
    leaving: list[Candidate] = []
    for donor_id, size in reversed(displaced):
        taken = host.take_tokens(size.tokens - free_tokens)
        if taken is None:
            leaving.append((donor_id, size))
            continue
        leaving += taken
        free_tokens += sum(victim.tokens for _, victim in taken) - size.tokens
        demoted.insert(0, (donor_id, size))
    return demoted, leaving


def _settled(tier: Tier, demoted: list[Candidate], leaving: list[Candidate], room: Room) -> Placement | None:
    """The placement, once one more donor may be held: for that go those of the disk first, then those that leave memory
    anyway, then the host's, those on their way down, and the device's. None when there are not enough."""
    dropped = [donor_id for donor_id, size in leaving if not size.has_file]
    released = [donor_id for donor_id, size in leaving if size.has_file]
    while room.free.donors + len(dropped) < 1:
        if (candidate := room.disk.next()) is not None:
            dropped.append(candidate[0])
        elif released:
            dropped.append(released.pop(0))
        elif (candidate := room.host.next()) is not None:
            dropped.append(candidate[0])
        elif demoted:
            dropped.append(demoted.pop(0)[0])
        elif (candidate := room.device.next()) is not None:
            dropped.append(candidate[0])
        else:
            return None
    return Placement(tier, tuple(donor_id for donor_id, _ in demoted), tuple(dropped), tuple(released))
