"""DonorTable: every donor's entry, the room that it takes, and which donors would make more room.

A new donor goes to the device first. The donors that it displaces move down to the host, then out. A donor with a file
on disk is not lost when it leaves memory: it is released, and may be fetched again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, islice
from typing import TYPE_CHECKING

from semblend_trt.donors.donor_file import file_bytes
from semblend_trt.donors.eviction import policy_of
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.config import Eviction
    from semblend_trt.donors.eviction import DonorHistory


# For so long files take no more room than they did when the disk was found to be full.
FULL_SECONDS = 60.0


class Tier(str, Enum):
    """What holds donors: the arena on the card, (page-locked) host memory, or files. On disk alone none is readable."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class DonorState(str, Enum):
    """SAVING: room is reserved, nothing can be read. READY: its KV is held. FETCHING: it is being read from disk."""

    SAVING = "saving"
    READY = "ready"
    FETCHING = "fetching"


class FileState(str, Enum):
    """The donor's file: there is none, its room is reserved and it is being written, or it is there."""

    NONE = "none"
    WRITING = "writing"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Capacities:
    """`host_bytes` bounds one rank's KV on the host; `bytes_per_token` is K and V of all `num_layers` layers.

    The arena on the card has `device_blocks` blocks of `block_size` tokens. `disk_bytes` bounds the files.
    """

    host_bytes: int
    bytes_per_token: int
    max_donors: int
    device_blocks: int = 0
    block_size: int = 1
    disk_bytes: int = 0
    num_layers: int = 1

    def limit(self, tier: Tier) -> int:
        """Blocks of the arena, tokens of the host, or bytes of files."""
        if tier is Tier.DEVICE:
            return self.device_blocks
        return self.host_bytes // self.bytes_per_token if tier is Tier.HOST else self.disk_bytes

    def room(self, tier: Tier, tokens: int) -> int:
        """What a donor of `tokens` tokens takes in `tier`, in the unit of `limit`."""
        if tier is Tier.DEVICE:
            return -(-tokens // self.block_size)
        return tokens if tier is Tier.HOST else file_bytes(self.num_layers, self.bytes_per_token, tokens)


@dataclass(slots=True)
class Entry:
    """One donor. `history.tokens` is what it takes in `tier`; while it is promoted it takes room on the device too.
    `is_retried`: the disk had no room for its file, and others were dropped for it."""

    tier: Tier
    history: DonorHistory
    state: DonorState = DonorState.SAVING
    file: FileState = FileState.NONE
    leases: int = 0
    is_promoting: bool = False
    is_retried: bool = False

    @property
    def is_readable(self) -> bool:
        """True when its KV is in memory."""
        return self.state is DonorState.READY and self.tier is not Tier.DISK

    @property
    def is_resting(self) -> bool:
        """True when its KV would first have to be read from disk."""
        return self.tier is Tier.DISK or self.state is DonorState.FETCHING

    @property
    def is_movable(self) -> bool:
        """True when nothing reads it and nothing is on its way; a donor that is being written is read for that."""
        is_still = self.state is DonorState.READY and self.file is not FileState.WRITING and not self.is_promoting
        return is_still and not self.leases


@dataclass(frozen=True, slots=True)
class TierMoves:
    """A donor goes to `tier`. Before its bytes move there, in this order, `dropped` go, `released` leave memory and
    keep their files, and `offloaded` move to the host. `written` names those of the offloaded, and the donor itself,
    that get a file as soon as they are in host memory."""

    tier: Tier
    offloaded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def moved(self) -> tuple[str, ...]:
        """The other donors that make room."""
        return self.offloaded + self.dropped + self.released


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts at one moment. `used_bytes` (host), `device_blocks_used` and `disk_bytes_used` include what is reserved;
    `ready` donors are in memory, `resting` on disk alone. The counts behind them go on since the start."""

    ready: int
    saving: int
    leases: int
    used_bytes: int
    device_blocks_used: int = 0
    resting: int = 0
    disk_bytes_used: int = 0
    evicted: int = 0
    offloaded: int = 0
    released: int = 0
    promoted: int = 0
    fetched: int = 0


class DonorTable:
    """Not thread safe; the catalog locks. `used` counts in the units of `Capacities.limit`.

    `writes_files` says that donors which come into host memory get a file where there is room.
    """

    def __init__(self, capacities: Capacities, eviction: Eviction) -> None:
        self.capacities = capacities
        self.entries: dict[str, Entry] = {}
        self.used = dict.fromkeys(Tier, 0)
        self.counts = dict.fromkeys(("evicted", "offloaded", "released", "promoted", "fetched"), 0)
        self.writes_files = False
        self._eviction = {tier: policy_of(eviction) for tier in Tier}
        self._tick = 0
        self._resting: frozenset[str] | None = None
        self._full_at, self._full_until = 0, 0.0

    # -- one donor -------------------------------------------------------------------------------------------------

    def enter(self, donor_id: str, entry: Entry) -> None:
        """Holds a donor that takes room in its tier, and in files where it has one."""
        self.entries[donor_id] = entry
        self._take(entry, 1)

    def resize(self, entry: Entry, tokens: int) -> None:
        """The donor takes the room of `tokens` tokens from now on."""
        self._take(entry, -1)
        entry.history.tokens = tokens
        self._take(entry, 1)

    def make_ready(self, donor_id: str, *, is_new: bool = True) -> None:
        """The donor may be leased, or fetched, and counts as just used; a new one's history begins."""
        entry = self.entries[donor_id]
        entry.state = DonorState.READY
        self._stamp(entry)
        if not is_new:
            entry.history.uses += 1
        self._eviction[entry.tier].added(donor_id, entry.history)
        self._resting = None

    def count_use(self, donor_id: str) -> None:
        entry = self.entries[donor_id]
        self._stamp(entry)
        entry.history.uses += 1
        self._eviction[entry.tier].used(donor_id)

    def set_file(self, entry: Entry, state: FileState) -> None:
        self._take(entry, -1)
        entry.file = state
        self._take(entry, 1)

    def move(self, donor_id: str, tier: Tier, *, evicted: bool = False) -> None:
        """The donor takes its room in `tier` from now on, and is a candidate there when it is ready."""
        entry = self.entries[donor_id]
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        self._take(entry, -1)
        entry.tier = tier
        self._take(entry, 1)
        if entry.state is DonorState.READY:
            self._eviction[tier].added(donor_id, entry.history)
        self._resting = None

    def remove(self, donor_id: str, *, evicted: bool = False) -> None:
        entry = self.entries.pop(donor_id)
        self._take(entry, -1)
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        self._resting = None

    # -- room ------------------------------------------------------------------------------------------------------

    def free(self, tier: Tier) -> int:
        is_full = tier is Tier.DISK and time.monotonic() < self._full_until
        return (self._full_at if is_full else self.capacities.limit(tier)) - self.used[tier]

    def movable(self, tier: Tier, but: str = "") -> Iterator[str]:
        """Donors of `tier` that may go, `but` this one, in the order in which they should; the table must not change
        meanwhile."""
        candidates = (each for each in self._eviction[tier].candidates() if each != but)
        return (donor_id for donor_id in candidates if self.entries[donor_id].is_movable)

    def place(self, donor_id: str, tokens: int, continues: str = "") -> TierMoves:
        """Where a new donor would go and which donors would make room; none has moved yet. Raises CapacityError.

        The donor that it `continues` makes room first, where it can and without it another one would have to move.
        """
        moves, old = self._search(tokens), self.entries.get(continues)
        if (moves is None or moves.moved) and old is not None and old.is_movable and old.tier is not Tier.DISK:
            moves = self._search(tokens, continues) or moves
        if moves is None:
            limits = self.capacities
            raise CapacityError(
                f"donor {donor_id} needs {tokens * limits.bytes_per_token} bytes of a budget of {limits.host_bytes}, "
                f"or {limits.room(Tier.DEVICE, tokens)} device blocks of {limits.device_blocks}, and one place of "
                f"{limits.max_donors}; the donors that are leased or being saved leave no room, raise "
                "SEMBLEND_HOST_BYTES, SEMBLEND_DEVICE_BYTES or SEMBLEND_MAX_DONORS"
            )
        return moves

    def _search(self, tokens: int, leaving: str = "") -> TierMoves | None:
        on_device = RoomSearch(self, tokens, leaving=leaving).on_device()
        return on_device or RoomSearch(self, tokens, leaving=leaving).on_host()

    def apply(self, moves: TierMoves, continues: str = "") -> TierMoves:
        """Carries `moves` out. Returns them with the donors that get a file, and those that are dropped for it. What
        the new donor `continues` goes without being evicted."""
        for donor_id in moves.dropped:
            self.remove(donor_id, evicted=donor_id != continues)
        for donor_id in moves.released:
            self.move(donor_id, Tier.DISK, evicted=donor_id != continues)
        for donor_id in moves.offloaded:
            self.move(donor_id, Tier.HOST, evicted=True)
        self.counts["evicted"] += len(moves.dropped) - (continues in moves.dropped)
        self.counts["released"] += len(moves.released)
        self.counts["offloaded"] += len(moves.offloaded)
        return self.with_files(moves, moves.offloaded)

    def with_files(self, moves: TierMoves, donor_ids: tuple[str, ...]) -> TierMoves:
        """`moves` with those of `donor_ids` that get a file, and the donors whose files make room for it."""
        written, dropped = list(moves.written), list(moves.dropped)
        for donor_id in donor_ids:
            entry = self.entries[donor_id]
            if self.writes_files and entry.file is FileState.NONE:
                victims = self.make_file_room(entry.history.tokens)
                if victims is not None:
                    dropped += victims
                    self.set_file(entry, FileState.WRITING)
                    written.append(donor_id)
        released = tuple(donor_id for donor_id in moves.released if donor_id not in dropped)
        return replace(moves, written=tuple(written), dropped=tuple(dropped), released=released)

    def make_file_room(self, tokens: int, *, is_held: bool = True) -> tuple[str, ...] | None:
        """Drops donors on disk alone for the file of a donor of `tokens` tokens, and for the donor itself where it is
        not held yet; returns them. None, and nothing has changed, when they do not suffice."""
        missing = self.capacities.room(Tier.DISK, tokens) - self.free(Tier.DISK)
        crowd = 0 if is_held else len(self.entries) + 1 - self.capacities.max_donors
        candidates, victims = self.movable(Tier.DISK), list[str]()
        while missing > 0 or crowd > len(victims):
            donor_id = next(candidates, None)
            if donor_id is None:
                return None
            victims.append(donor_id)
            missing -= self.capacities.room(Tier.DISK, self.entries[donor_id].history.tokens)
        for victim in victims:
            self.remove(victim, evicted=True)
        self.counts["evicted"] += len(victims)
        return tuple(victims)

    def refuse_file(self, entry: Entry, free: int) -> tuple[str, ...] | None:
        """Drops donors on disk alone for a file that the disk had no room for, and returns them; None where none go.

        For FULL_SECONDS all files take no more room than now, and what is `free`. Where that did not help, something
        else takes the room, and no file is written meanwhile.
        """
        # As much as the file needs is free where a quota or the inodes are used up.
        free = free if free < self.capacities.room(Tier.DISK, entry.history.tokens) else 0
        self._full_at = 0 if entry.is_retried else self.used[Tier.DISK] + free
        self._full_until = time.monotonic() + FULL_SECONDS
        victims = self.make_file_room(entry.history.tokens)
        entry.is_retried = victims is not None
        if entry.is_retried:
            self.set_file(entry, FileState.WRITING)
        return victims

    # -- what is held ----------------------------------------------------------------------------------------------

    def resting(self) -> frozenset[str]:
        """Donors that are on disk alone or still being read back."""
        if self._resting is None:
            self._resting = frozenset(donor_id for donor_id, entry in self.entries.items() if entry.is_resting)
        return self._resting

    def stats(self) -> CatalogStats:
        entries = self.entries.values()
        return CatalogStats(
            ready=sum(entry.is_readable for entry in entries),
            saving=sum(entry.state is DonorState.SAVING for entry in entries),
            leases=sum(entry.leases for entry in entries),
            used_bytes=self.used[Tier.HOST] * self.capacities.bytes_per_token,
            device_blocks_used=self.used[Tier.DEVICE],
            resting=sum(entry.is_resting for entry in entries),
            disk_bytes_used=self.used[Tier.DISK],
            **self.counts,
        )

    def _stamp(self, entry: Entry) -> None:
        self._tick += 1
        entry.history.last_use = self._tick

    def _take(self, entry: Entry, sign: int) -> None:
        """Adds the entry's room to what is used, or with -1 takes it off."""
        tiers = {entry.tier} - {Tier.DISK}
        if entry.is_promoting:
            tiers.add(Tier.DEVICE)
        if entry.file is not FileState.NONE:
            tiers.add(Tier.DISK)
        for tier in tiers:
            self.used[tier] += sign * self.capacities.room(tier, entry.history.tokens)


class RoomSearch:
    """Looks once for the room of one donor of `tokens` tokens. Nothing moves until its result is applied."""

    def __init__(self, table: DonorTable, tokens: int, *, is_held: bool = False, leaving: str = "") -> None:
        """`is_held`: the donor has a place in the table already. `leaving`: a donor that leaves memory in any case."""
        self._table, self._tokens, self._leaving = table, tokens, leaving
        self._places = 1 if is_held else table.capacities.max_donors - len(table.entries)
        tiers = (Tier.DEVICE, Tier.HOST, Tier.DISK)
        self._device, self._host, self._disk = (table.movable(tier, leaving) for tier in tiers)

    def on_host(self) -> TierMoves | None:
        """What makes room for the donor in host memory; None when nothing does."""
        if self._tokens > self._table.capacities.limit(Tier.HOST):
            return None
        leaving = self._from_host(self._tokens - self._free(Tier.HOST))
        return None if leaving is None else self._moves(Tier.HOST, [], leaving)

    def on_device(self) -> TierMoves | None:
        """What makes room for the donor in the arena; None when nothing does.

        Of the displaced, the one used last has the first claim on host memory. Those that do not fit there leave.
        """
        limits = self._table.capacities
        missing = limits.room(Tier.DEVICE, self._tokens) - self._free(Tier.DEVICE)
        if limits.room(Tier.DEVICE, self._tokens) > limits.device_blocks:
            return None
        displaced: list[str] = []
        while missing > 0:
            donor_id = next(self._device, None)
            if donor_id is None:
                return None
            displaced.append(donor_id)
            missing -= limits.room(Tier.DEVICE, self._tokens_of(donor_id))
        offloaded, leaving, free = list[str](), list[str](), self._free(Tier.HOST)
        for donor_id in reversed(displaced):
            taken = self._from_host(self._tokens_of(donor_id) - free)
            if taken is None:
                leaving.append(donor_id)
                continue
            leaving += taken
            free += sum(map(self._tokens_of, taken)) - self._tokens_of(donor_id)
            offloaded.insert(0, donor_id)
        return self._moves(Tier.DEVICE, offloaded, leaving)

    def _from_host(self, missing: int) -> list[str] | None:
        """The next donors of the host that together hold `missing` tokens; None, and none is taken, when there are too
        few."""
        taken: list[str] = []
        while missing > 0:
            donor_id = next(self._host, None)
            if donor_id is None:
                self._host = iter(taken)
                return None
            taken.append(donor_id)
            missing -= self._tokens_of(donor_id)
        return taken

    def _moves(self, tier: Tier, offloaded: list[str], leaving: list[str]) -> TierMoves | None:
        """The moves, with more donors that go where the table has no place left; None when there are too few."""
        leaving = [self._leaving, *leaving] if self._leaving else leaving
        released = [each for each in leaving if self._table.entries[each].file is FileState.HELD]
        dropped = [each for each in leaving if each not in released]
        # Donors on disk go first, then those that leave memory anyway, the host's, those on their way there, and the
        # device's.
        more = chain(self._disk, released, self._host, offloaded, self._device)
        dropped += islice(more, max(0, 1 - self._places - len(dropped)))
        if self._places + len(dropped) < 1:
            return None
        kept, let_go = ([each for each in ids if each not in dropped] for ids in (offloaded, released))
        return TierMoves(tier, tuple(kept), tuple(dropped), tuple(let_go))

    def _free(self, tier: Tier) -> int:
        free, old = self._table.free(tier), self._table.entries.get(self._leaving)
        is_here = old is not None and old.tier is tier
        return free + (self._table.capacities.room(tier, self._tokens_of(self._leaving)) if is_here else 0)

    def _tokens_of(self, donor_id: str) -> int:
        return self._table.entries[donor_id].history.tokens
