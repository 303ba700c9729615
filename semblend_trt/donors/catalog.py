"""DonorCatalog: where each donor is held, the room that it takes, and which donors make room for another.

It runs on the scheduler and decides for every rank. A donor is *saving* from `reserve` to `commit`, then *ready*. Only
ready donors can be leased, moved or evicted; a leased one neither moves down nor goes. A donor counts in one tier: in
the host's from the decision to offload it on, and in both while it is promoted.

A new donor goes to the device first. The donors that it displaces move down to the host, then out. A file is a second
copy: a donor that has one is not lost when it leaves memory, but released, and may be fetched again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, islice
from typing import TYPE_CHECKING

from semblend_trt.donors.eviction import DonorHistory, policy_of
from semblend_trt.errors import CapacityError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from semblend_trt.config import Eviction

# For this long files take no more room than they did when the disk was found to be full.
FULL_SECONDS = 60.0
# A donor is promoted before its room on the host is free: that may cost this share of the host's tokens at most.
_PROMOTION_SHARE = 16


class Tier(str, Enum):
    """What holds donors: the arena on the card, (page-locked) host memory, or files. On disk alone none is readable."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class _State(str, Enum):
    """SAVING: room is reserved, nothing can be read. READY: its KV is held. FETCHING: it is being read from disk."""

    SAVING = "saving"
    READY = "ready"
    FETCHING = "fetching"


class _File(str, Enum):
    """The donor's file: there is none, its room is reserved and it is being written, or it is there."""

    NONE = "none"
    WRITING = "writing"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Capacities:
    """`host_bytes` bounds one rank's KV on the host; `bytes_per_token` is K and V of all layers.

    The arena on the card has `device_blocks` blocks of `block_size` tokens. `disk_bytes` bounds the files; that of a
    donor of n tokens has `file_bytes(n)`.
    """

    host_bytes: int
    bytes_per_token: int
    max_donors: int
    device_blocks: int = 0
    block_size: int = 1
    disk_bytes: int = 0
    file_bytes: Callable[[int], int] = int

    def limit(self, tier: Tier) -> int:
        """Blocks of the arena, tokens of the host, or bytes of files."""
        if tier is Tier.DEVICE:
            return self.device_blocks
        return self.host_bytes // self.bytes_per_token if tier is Tier.HOST else self.disk_bytes

    def room(self, tier: Tier, tokens: int) -> int:
        """What a donor of `tokens` tokens takes in `tier`, in the unit of `limit`."""
        if tier is Tier.DEVICE:
            return -(-tokens // self.block_size)
        return tokens if tier is Tier.HOST else self.file_bytes(tokens)


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


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts at one moment. `used_bytes` (host), `device_blocks_used` and `disk_bytes_used` include what is reserved;
    `ready` donors are in memory, `resting` on disk alone. The later counts go on since the start."""

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


@dataclass(slots=True)
class _Entry:
    """One donor. `history.tokens` is what it takes in `tier`; while it is promoted it takes room on the device too.
    `is_retried`: the disk had no room for its file, and others were dropped for it."""

    tier: Tier
    history: DonorHistory
    state: _State = _State.SAVING
    file: _File = _File.NONE
    leases: int = 0
    is_promoting: bool = False
    is_retried: bool = False

    @property
    def tokens(self) -> int:
        return self.history.tokens

    @property
    def is_readable(self) -> bool:
        """True when its KV is in memory."""
        return self.state is _State.READY and self.tier is not Tier.DISK

    @property
    def is_resting(self) -> bool:
        """True when its KV would first have to be read from disk."""
        return self.tier is Tier.DISK or self.state is _State.FETCHING

    @property
    def is_movable(self) -> bool:
        """True when nothing reads it and nothing is on its way; a donor that is being written is read for that."""
        is_still = self.state is _State.READY and self.file is not _File.WRITING and not self.is_promoting
        return is_still and not self.leases


class Lease:
    """One reader's hold on one donor, which is not dropped before `release`. A second release does nothing."""

    def __init__(self, donor_id: str, end: Callable[[Lease], None]) -> None:
        self.donor_id = donor_id
        self.released = False
        self._end = end

    def release(self) -> None:
        self._end(self)


class DonorCatalog:
    """Which donors are held, in which tier, what room they take, and which are leased. Thread safe.

    `generations` holds those above 0: how often a donor's KV was built from approximate KV.
    """

    def __init__(self, capacities: Capacities, eviction: Eviction) -> None:
        self.capacities = capacities
        self.generations: dict[str, int] = {}
        self._entries: dict[str, _Entry] = {}
        self._used = dict.fromkeys(Tier, 0)
        self._counts = Counter[str]()
        self._writes_files = False
        self._eviction = {tier: policy_of(eviction) for tier in Tier}
        self._tick = 0
        self._full_at, self._full_until = 0, 0.0
        self._lock = threading.Lock()

    # -- a donor's life --------------------------------------------------------------------------------------------

    def reserve(self, donor_id: str, tokens: int, continues: str = "", generation: int = 0) -> TierMoves:
        """Makes room for a donor of at most `tokens` tokens, on the device where that is possible.

        The donor that it `continues` leaves memory where another one would have to move without that. Raises ValueError
        when the id is taken, and CapacityError when no unleased donors make enough room; nothing has changed then.
        """
        with self._lock:
            if donor_id in self._entries:
                raise ValueError(f"donor {donor_id} is already held; use another id or drop it first")
            old = self._entries.get(continues)
            moves = self._apply(self._place(donor_id, tokens, continues), continues)
            history = DonorHistory(tokens, uses=0 if old is None else old.history.uses)
            self._enter(donor_id, _Entry(moves.tier, history), generation)
            return self._with_files(moves, (donor_id,)) if moves.tier is Tier.HOST else moves

    def commit(self, donor_id: str, tokens: int) -> Tier:
        """Makes a saving donor ready with the `tokens` it really holds, at most those reserved, and frees the rest.

        Returns its tier.
        """
        with self._lock:
            entry = self._entries[donor_id]
            self._take(entry, -1)
            entry.history.tokens = tokens
            self._take(entry, 1)
            self._make_ready(donor_id, entry)
            return entry.tier

    def cancel(self, donor_id: str) -> bool:
        """Gives the room of a saving donor back; False when there is no such donor or it is ready."""
        return self._remove_where(lambda entry: entry.state is _State.SAVING, donor_id)

    def lease(self, donor_id: str) -> Lease:
        """Holds a ready donor and counts as a use; raises DonorUnavailableError when it is not in memory."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or not entry.is_readable:
                raise DonorUnavailableError(f"donor {donor_id} is not held and cannot be leased")
            entry.leases += 1
            self._count_use(donor_id, entry)
            return Lease(donor_id, self._end_lease)

    def touch(self, donor_id: str) -> None:
        """Counts as a use of a ready donor; nothing happens for any other."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is not None and entry.state is _State.READY:
                self._count_use(donor_id, entry)

    def drop(self, donor_id: str) -> bool:
        """Drops a ready donor; False, and nothing happens, when it is read, on its way somewhere, or not held."""
        return self._remove_where(lambda entry: entry.is_movable, donor_id)

    # -- files, and ways up ----------------------------------------------------------------------------------------

    def begin_writing(self) -> None:
        """From now on donors that come into host memory get a file where there is room for one."""
        self._writes_files = self.capacities.disk_bytes > 0

    def adopt(self, donor_id: str, tokens: int, generation: int = 0) -> tuple[str, ...] | None:
        """Takes in a donor whose file was found; returns the donors on disk alone that were dropped for it.

        None, and nothing has changed, when the id is taken or they do not make enough room.
        """
        with self._lock:
            if donor_id in self._entries:
                return None
            dropped = self._make_file_room(tokens, is_held=False)
            if dropped is not None:
                entry = _Entry(Tier.DISK, DonorHistory(tokens), file=_File.HELD)
                self._enter(donor_id, entry, generation)
                self._make_ready(donor_id, entry)
            return dropped

    def written(self, donor_id: str, succeeded: bool, free: int | None = None) -> tuple[str, ...] | None:
        """The donor's file has been written, or could not be. Where the disk had no more than `free` bytes for it,
        returns the donors on disk alone that were dropped, after which it is to be written again; else None."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.file is not _File.WRITING:
                return None
            self._set_file(entry, _File.HELD if succeeded else _File.NONE)
            return None if free is None else self._refuse_file(entry, free)

    def fetch(self, donor_id: str, *, may_drop: bool = True) -> TierMoves | None:
        """Makes room on the host for a donor that is on disk alone; None when it is not, or there is no room.

        Without `may_drop` only donors that have a file make room. The donor cannot be leased until `fetched` says that
        it has been read back.
        """
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.tier is not Tier.DISK or not entry.is_movable:
                return None
            moves = _RoomSearch(self, entry.tokens, is_held=True).on_host()
            if moves is None or (moves.dropped and not may_drop):
                return None
            entry.state = _State.FETCHING
            moves = self._apply(moves)
            self._move(donor_id, Tier.HOST)
            return moves

    def fetched(self, donor_id: str, succeeded: bool) -> bool:
        """The donor has been read back, or is lost. Returns False when it was not being fetched."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.state is not _State.FETCHING:
                return False
            if succeeded:
                entry.history.uses += 1
                self._make_ready(donor_id, entry)
                self._counts["fetched"] += 1
            else:
                self._remove(donor_id)
            return True

    def promote(self, donor_id: str) -> TierMoves | None:
        """Makes room on the device for a donor of the host; None when it is not there, or when too many tokens would be
        dropped for it.

        It stays readable on the host until `promoted` says that it has been copied.
        """
        with self._lock:
            entry = self._entries.get(donor_id)
            is_on_host = entry is not None and entry.is_readable and entry.tier is Tier.HOST
            if entry is None or not is_on_host or entry.is_promoting or entry.file is _File.WRITING:
                return None
            entry.is_promoting = True  # so that it does not make room for itself
            moves = _RoomSearch(self, entry.tokens, is_held=True).on_device()
            lost = sum(self._entries[each].tokens for each in (() if moves is None else moves.dropped))
            if moves is None or lost > self.capacities.limit(Tier.HOST) // _PROMOTION_SHARE:
                entry.is_promoting = False
                return None
            self._used[Tier.DEVICE] += self.capacities.room(Tier.DEVICE, entry.tokens)
            return self._apply(moves)

    def promoted(self, donor_id: str, succeeded: bool) -> None:
        """The donor has been copied to the device and left the host, or stays where it was."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or not entry.is_promoting:
                return
            self._used[Tier.DEVICE] -= self.capacities.room(Tier.DEVICE, entry.tokens)
            entry.is_promoting = False
            if succeeded:
                self._move(donor_id, Tier.DEVICE)
                self._counts["promoted"] += 1

    # -- what is held ----------------------------------------------------------------------------------------------

    def tier(self, donor_id: str) -> Tier | None:
        """The tier in which the donor counts; None when it is not held."""
        entry = self._entries.get(donor_id)
        return None if entry is None else entry.tier

    def is_writing(self, donor_id: str) -> bool:
        """Whether the donor's file is still to be written."""
        entry = self._entries.get(donor_id)
        return entry is not None and entry.file is _File.WRITING

    def resting(self) -> frozenset[str]:
        """Donors that can be found but not leased, because they are on disk alone or still being read back."""
        with self._lock:
            return frozenset(donor_id for donor_id, entry in self._entries.items() if entry.is_resting)

    def stats(self) -> CatalogStats:
        with self._lock:
            entries = self._entries.values()
            return CatalogStats(
                ready=sum(entry.is_readable for entry in entries),
                saving=sum(entry.state is _State.SAVING for entry in entries),
                leases=sum(entry.leases for entry in entries),
                used_bytes=self._used[Tier.HOST] * self.capacities.bytes_per_token,
                device_blocks_used=self._used[Tier.DEVICE],
                resting=sum(entry.is_resting for entry in entries),
                disk_bytes_used=self._used[Tier.DISK],
                **self._counts,
            )

    def __len__(self) -> int:
        return len(self._entries)

    # -- one entry; the caller holds the lock ------------------------------------------------------------------------

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            if not lease.released:
                lease.released = True
                self._entries[lease.donor_id].leases -= 1

    def _enter(self, donor_id: str, entry: _Entry, generation: int) -> None:
        self._entries[donor_id] = entry
        self._take(entry, 1)
        if generation:
            self.generations[donor_id] = generation

    def _make_ready(self, donor_id: str, entry: _Entry) -> None:
        """The donor may be leased, or fetched, and counts as just used."""
        entry.state = _State.READY
        self._tick += 1
        entry.history.last_use = self._tick
        self._eviction[entry.tier].added(donor_id, entry.history)

    def _count_use(self, donor_id: str, entry: _Entry) -> None:
        self._tick += 1
        entry.history.last_use = self._tick
        entry.history.uses += 1
        self._eviction[entry.tier].used(donor_id)

    def _set_file(self, entry: _Entry, state: _File) -> None:
        self._take(entry, -1)
        entry.file = state
        self._take(entry, 1)

    def _move(self, donor_id: str, tier: Tier, *, evicted: bool = False) -> None:
        """The donor takes its room in `tier` from now on, and is a candidate there when it is ready."""
        entry = self._entries[donor_id]
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        self._take(entry, -1)
        entry.tier = tier
        self._take(entry, 1)
        if entry.state is _State.READY:
            self._eviction[tier].added(donor_id, entry.history)

    def _remove_where(self, may_go: Callable[[_Entry], bool], donor_id: str) -> bool:
        with self._lock:
            is_going = donor_id in self._entries and may_go(self._entries[donor_id])
            if is_going:
                self._remove(donor_id)
            return is_going

    def _remove(self, donor_id: str, *, evicted: bool = False) -> None:
        entry = self._entries.pop(donor_id)
        self._take(entry, -1)
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        self.generations.pop(donor_id, None)

    def _take(self, entry: _Entry, sign: int) -> None:
        """Adds the entry's room to what is used, or with -1 takes it off."""
        tiers = {entry.tier} - {Tier.DISK}
        if entry.is_promoting:
            tiers.add(Tier.DEVICE)
        if entry.file is not _File.NONE:
            tiers.add(Tier.DISK)
        for tier in tiers:
            self._used[tier] += sign * self.capacities.room(tier, entry.tokens)

    # -- room; the caller holds the lock -----------------------------------------------------------------------------

    def _free(self, tier: Tier) -> int:
        is_full = tier is Tier.DISK and time.monotonic() < self._full_until
        return (self._full_at if is_full else self.capacities.limit(tier)) - self._used[tier]

    def _movable(self, tier: Tier, but: str = "") -> Iterator[str]:
        """Donors of `tier` that may go, `but` this one, in the order in which they should."""
        candidates = self._eviction[tier].candidates()
        return (each for each in candidates if each != but and self._entries[each].is_movable)

    def _place(self, donor_id: str, tokens: int, continues: str) -> TierMoves:
        """Where a new donor would go and which donors would make room; none has moved yet. Raises CapacityError.

        The donor that it `continues` makes room first, where it can and without it another one would have to move.
        """
        moves, old, limits = self._search(tokens), self._entries.get(continues), self.capacities
        others_move = moves is None or moves.offloaded or moves.dropped or moves.released
        if others_move and old is not None and old.is_movable and old.tier is not Tier.DISK:
            moves = self._search(tokens, continues) or moves
        if moves is None:
            raise CapacityError(
                f"donor {donor_id} needs {tokens * limits.bytes_per_token} bytes of a budget of {limits.host_bytes}, "
                f"or {limits.room(Tier.DEVICE, tokens)} device blocks of {limits.device_blocks}, and one place of "
                f"{limits.max_donors}; the donors that are leased or being saved leave no room, raise "
                "SEMBLEND_HOST_BYTES, SEMBLEND_DEVICE_BYTES or SEMBLEND_MAX_DONORS"
            )
        return moves

    def _search(self, tokens: int, leaving: str = "") -> TierMoves | None:
        on_device = _RoomSearch(self, tokens, leaving=leaving).on_device()
        return on_device or _RoomSearch(self, tokens, leaving=leaving).on_host()

    def _apply(self, moves: TierMoves, continues: str = "") -> TierMoves:
        """Carries `moves` out. Returns them with the donors that get a file, and those that are dropped for it. What
        the new donor `continues` goes without being evicted."""
        for donor_id in moves.dropped:
            self._remove(donor_id, evicted=donor_id != continues)
        for donor_id in moves.released:
            self._move(donor_id, Tier.DISK, evicted=donor_id != continues)
        for donor_id in moves.offloaded:
            self._move(donor_id, Tier.HOST, evicted=True)
        evicted = len(moves.dropped) - (continues in moves.dropped)
        self._counts.update(evicted=evicted, released=len(moves.released), offloaded=len(moves.offloaded))
        return self._with_files(moves, moves.offloaded)

    def _with_files(self, moves: TierMoves, donor_ids: tuple[str, ...]) -> TierMoves:
        """`moves` with those of `donor_ids` that get a file, and the donors whose files make room for it."""
        written, dropped = list(moves.written), list(moves.dropped)
        for donor_id in donor_ids if self._writes_files else ():
            entry = self._entries[donor_id]
            if entry.file is _File.NONE and (victims := self._make_file_room(entry.tokens)) is not None:
                dropped += victims
                self._set_file(entry, _File.WRITING)
                written.append(donor_id)
        released = tuple(donor_id for donor_id in moves.released if donor_id not in dropped)
        return replace(moves, written=tuple(written), dropped=tuple(dropped), released=released)

    def _make_file_room(self, tokens: int, *, is_held: bool = True) -> tuple[str, ...] | None:
        """Drops donors on disk alone for the file of a donor of `tokens` tokens, and for the donor itself where it is
        not held yet; returns them. None, and nothing has changed, when they do not suffice."""
        missing = self.capacities.room(Tier.DISK, tokens) - self._free(Tier.DISK)
        crowd = 0 if is_held else len(self._entries) + 1 - self.capacities.max_donors
        candidates, victims = self._movable(Tier.DISK), list[str]()
        while missing > 0 or crowd > len(victims):
            donor_id = next(candidates, None)
            if donor_id is None:
                return None
            victims.append(donor_id)
            missing -= self.capacities.room(Tier.DISK, self._entries[donor_id].tokens)
        for victim in victims:
            self._remove(victim, evicted=True)
        self._counts["evicted"] += len(victims)
        return tuple(victims)

    def _refuse_file(self, entry: _Entry, free: int) -> tuple[str, ...] | None:
        """Drops donors on disk alone for a file that the disk had no room for, and returns them; None where none go.

        For FULL_SECONDS all files take no more room than now, and what is `free`. Where that did not help, something
        else takes the room, and no file is written meanwhile.
        """
        # As much as the file needs is free where a quota or the inodes are used up.
        free = free if free < self.capacities.room(Tier.DISK, entry.tokens) else 0
        self._full_at = 0 if entry.is_retried else self._used[Tier.DISK] + free
        self._full_until = time.monotonic() + FULL_SECONDS
        victims = self._make_file_room(entry.tokens)
        entry.is_retried = victims is not None
        if entry.is_retried:
            self._set_file(entry, _File.WRITING)
        return victims


class _RoomSearch:
    """Looks once for the room of one donor of `tokens` tokens. Nothing moves until its result is applied."""

    def __init__(self, catalog: DonorCatalog, tokens: int, *, is_held: bool = False, leaving: str = "") -> None:
        """`is_held`: the donor has a place already. `leaving`: a donor that leaves memory in any case."""
        self._limits, self._entries, self._free = catalog.capacities, catalog._entries, dict[Tier, int]()
        self._tokens, self._leaving, old = tokens, leaving, catalog._entries.get(leaving)
        self._places = 1 if is_held else self._limits.max_donors - len(self._entries)
        for tier in (Tier.DEVICE, Tier.HOST):
            is_here = old is not None and old.tier is tier
            self._free[tier] = catalog._free(tier) + (self._room(tier, leaving) if is_here else 0)
        self._device, self._host, self._disk = (catalog._movable(tier, leaving) for tier in Tier)

    def on_host(self) -> TierMoves | None:
        """What makes room for the donor in host memory; None when nothing does."""
        if self._tokens > self._limits.limit(Tier.HOST):
            return None
        leaving = self._from_host(self._tokens - self._free[Tier.HOST])
        return None if leaving is None else self._moves(Tier.HOST, [], leaving)

    def on_device(self) -> TierMoves | None:
        """What makes room for the donor in the arena; None when nothing does.

        Of the displaced, the one used last has the first claim on host memory. Those that do not fit there leave.
        """
        needed = self._limits.room(Tier.DEVICE, self._tokens)
        if needed > self._limits.device_blocks:
            return None
        missing, displaced = needed - self._free[Tier.DEVICE], list[str]()
        while missing > 0:
            donor_id = next(self._device, None)
            if donor_id is None:
                return None
            displaced.append(donor_id)
            missing -= self._room(Tier.DEVICE, donor_id)
        offloaded, leaving, free = list[str](), list[str](), self._free[Tier.HOST]
        for donor_id in reversed(displaced):
            taken = self._from_host(self._room(Tier.HOST, donor_id) - free)
            if taken is None:
                leaving.append(donor_id)
                continue
            leaving += taken
            free += sum(self._room(Tier.HOST, each) for each in taken) - self._room(Tier.HOST, donor_id)
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
            missing -= self._room(Tier.HOST, donor_id)
        return taken

    def _moves(self, tier: Tier, offloaded: list[str], leaving: list[str]) -> TierMoves | None:
        """The moves, with more donors that go where the catalog has no place left; None when there are too few."""
        leaving = [self._leaving, *leaving] if self._leaving else leaving
        released = [each for each in leaving if self._entries[each].file is _File.HELD]
        dropped = [each for each in leaving if each not in released]
        # Donors on disk go first, then those that leave memory anyway, the host's, those on their way there, and the
        # device's.
        more = chain(self._disk, released, self._host, offloaded, self._device)
        dropped += islice(more, max(0, 1 - self._places - len(dropped)))
        if self._places + len(dropped) < 1:
            return None
        kept, let_go = ([each for each in ids if each not in dropped] for ids in (offloaded, released))
        return TierMoves(tier, tuple(kept), tuple(dropped), tuple(let_go))

    def _room(self, tier: Tier, donor_id: str) -> int:
        return self._limits.room(tier, self._entries[donor_id].tokens)
