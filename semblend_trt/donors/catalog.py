"""DonorCatalog: where each donor is held, the room that it takes, and which donors make room for another.

It runs on the scheduler and decides for every rank. A donor is *saving* from `reserve` to `commit`, then *ready*. Only
ready donors are leased, moved or evicted, and a leased one neither moves down nor goes. A donor counts in one tier: in
the host's from the decision to offload it on, and in both while it is promoted.

A new donor goes to the device first. The donors that it displaces move down to the host, then out. A file is a second
copy: a donor that has one is released when it leaves memory, and may be fetched again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Literal

from semblend_trt.donors.eviction import DonorHistory, policy_of
from semblend_trt.errors import CapacityError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from semblend_trt.config import Eviction
    from semblend_trt.discovery.fingerprint import TokenArray

# For this long files take no more room than they did when the disk was found to be full.
FULL_SECONDS = 60.0
# A promotion may drop this share of the host's tokens at most: the donor's own room there is free only later.
_PROMOTION_SHARE = 16


class Tier(str, Enum):
    """What holds donors: the arena on the card, (page-locked) host memory, or files. On disk alone none is readable."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, eq=False)
class DonorText:
    """`tokens`: int32 [n]; `generation` is above 0 where the KV was built from approximate KV."""

    namespace_key: str
    tokens: TokenArray
    generation: int = 0


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
    keep their files, and `offloaded` move to the host. `written` are those of the offloaded, and the donor itself, that
    get a file as soon as they are in host memory."""

    tier: Tier
    offloaded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts at one moment. Used room includes what is reserved; `ready` donors are in memory, `resting` on disk alone.
    The counts from `evicted` on are totals since the start."""

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


@dataclass(slots=True, kw_only=True)
class _Entry(DonorHistory):
    """One donor, and what the policies read of it. While it is promoted it takes room on the device too. `is_retried`:
    the disk had no room for its file, and others were dropped for it."""

    tier: Tier
    state: Literal["saving", "ready", "fetching"] = "saving"
    file: Literal["none", "writing", "held"] = "none"  # from "writing" on it takes room on the disk
    leases: int = 0
    is_promoting: bool = False
    is_retried: bool = False

    @property
    def is_readable(self) -> bool:
        """True when its KV is in memory."""
        return self.state == "ready" and self.tier is not Tier.DISK

    @property
    def is_resting(self) -> bool:
        """True when its KV would first have to be read from disk."""
        return self.tier is Tier.DISK or self.state == "fetching"

    @property
    def is_movable(self) -> bool:
        """True when nothing reads it, its file's writer included, and nothing is on its way."""
        return self.state == "ready" and self.file != "writing" and not self.is_promoting and not self.leases


@dataclass(slots=True, eq=False)
class Lease:
    """One reader's hold on one donor, which is not dropped before `release`. A second release does nothing."""

    catalog: DonorCatalog
    donor_id: str
    released: bool = False

    def release(self) -> None:
        with self.catalog._lock:
            if not self.released:
                self.released = True
                self.catalog._entries[self.donor_id].leases -= 1


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
        self._ticks = count(1)
        self._full_at, self._full_until = 0, 0.0
        self._lock = threading.Lock()

    def reserve(self, donor_id: str, tokens: int, continues: str = "", generation: int = 0) -> TierMoves:
        """Makes room for a donor of at most `tokens` tokens, on the device where that is possible.

        The donor that it `continues` leaves memory where another one would have to move without that. Raises ValueError
        when the id is taken, and CapacityError when no unleased donors make enough room; nothing has changed then.
        """
        with self._lock:
            if donor_id in self._entries:
                raise ValueError(f"donor {donor_id} is already held; use another id or drop it first")
            moves, old, limits = self._search(tokens), self._entries.get(continues), self.capacities
            others_move = moves is None or moves.offloaded or moves.dropped or moves.released
            if others_move and old is not None and old.is_movable and old.tier is not Tier.DISK:
                moves = self._search(tokens, continues) or moves
            if moves is None:
                raise CapacityError(
                    f"donor {donor_id} needs {tokens * limits.bytes_per_token} bytes of a budget of "
                    f"{limits.host_bytes}, or {limits.room(Tier.DEVICE, tokens)} device blocks of "
                    f"{limits.device_blocks}, and one place of {limits.max_donors}; the donors that are leased or "
                    "being saved leave no room, raise SEMBLEND_HOST_BYTES, SEMBLEND_DEVICE_BYTES or SEMBLEND_MAX_DONORS"
                )
            moves = self._apply(moves, continues)
            entry = _Entry(tokens, uses=0 if old is None else old.uses, tier=moves.tier)
            self._enter(donor_id, entry, generation)
            return self._with_files(moves, (donor_id,)) if moves.tier is Tier.HOST else moves

    def commit(self, donor_id: str, tokens: int) -> Tier:
        """Makes a saving donor ready with the `tokens` it really holds, at most those reserved, and frees the rest.

        Returns its tier.
        """
        with self._lock:
            entry = self._entries[donor_id]
            with self._recounting(entry):
                entry.tokens = tokens
            self._make_ready(donor_id, entry)
            return entry.tier

    def cancel(self, donor_id: str) -> bool:
        """Gives the room of a saving donor back; False when there is no such donor or it is ready."""
        return self._remove_where(lambda entry: entry.state == "saving", donor_id)

    def drop(self, donor_id: str) -> bool:
        """Drops a ready donor; False, and nothing happens, when it is read, on its way somewhere, or not held."""
        return self._remove_where(lambda entry: entry.is_movable, donor_id)

    def lease(self, donor_id: str) -> Lease:
        """Holds a ready donor and counts as a use; raises DonorUnavailableError when it is not in memory."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or not entry.is_readable:
                raise DonorUnavailableError(f"donor {donor_id} is not held and cannot be leased")
            entry.leases += 1
            self._count_use(donor_id, entry)
            return Lease(self, donor_id)

    def touch(self, donor_id: str) -> None:
        """Counts as a use of a ready donor; nothing happens for any other."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is not None and entry.state == "ready":
                self._count_use(donor_id, entry)

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
                entry = _Entry(tokens, tier=Tier.DISK, file="held")
                self._enter(donor_id, entry, generation)
                self._make_ready(donor_id, entry)
            return dropped

    def written(self, donor_id: str, succeeded: bool, free: int | None = None) -> tuple[str, ...] | None:
        """The donor's file has been written, or could not be. Where the disk had no more than `free` bytes for it,
        returns the donors on disk alone that were dropped, after which it is to be written again; else None.

        The files then take no more room than now, and what is `free`, for FULL_SECONDS. Where that did not help,
        something else takes the room, and no file is written meanwhile.
        """
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.file != "writing":
                return None
            with self._recounting(entry):
                entry.file = "held" if succeeded else "none"
            if free is None:
                return None
            # As much as the file needs is free where a quota or the inodes are used up.
            free = free if free < self.capacities.room(Tier.DISK, entry.tokens) else 0
            self._full_at = 0 if entry.is_retried else self._used[Tier.DISK] + free
            self._full_until = time.monotonic() + FULL_SECONDS
            victims = self._make_file_room(entry.tokens)
            entry.is_retried = victims is not None
            if entry.is_retried:
                with self._recounting(entry):
                    entry.file = "writing"
            return victims

    def fetch(self, donor_id: str, *, may_drop: bool = True) -> TierMoves | None:
        """Makes room on the host for a donor that is on disk alone; None when it is not, or there is no room.

        Without `may_drop` only donors that have a file make room. The donor cannot be leased until `fetched` says that
        it has been read back.
        """
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.tier is not Tier.DISK or not entry.is_movable:
                return None
            moves = _RoomSearch(self, entry.tokens, is_held=True).on(Tier.HOST)
            if moves is None or (moves.dropped and not may_drop):
                return None
            entry.state = "fetching"
            moves = self._apply(moves)
            self._move(donor_id, Tier.HOST)
            return moves

    def fetched(self, donor_id: str, succeeded: bool) -> bool:
        """The donor has been read back, or is lost. Returns False when it was not being fetched."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.state != "fetching":
                return False
            if succeeded:
                entry.uses += 1
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
            if entry is None or entry.tier is not Tier.HOST or entry.state != "ready":
                return None
            if entry.is_promoting or entry.file == "writing":
                return None
            entry.is_promoting = True  # so that it does not make room for itself
            moves = _RoomSearch(self, entry.tokens, is_held=True).on(Tier.DEVICE)
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
            with self._recounting(entry):
                entry.is_promoting = False
            if succeeded:
                self._move(donor_id, Tier.DEVICE)
                self._counts["promoted"] += 1

    def tier(self, donor_id: str) -> Tier | None:
        """The tier in which the donor counts; None when it is not held."""
        entry = self._entries.get(donor_id)
        return None if entry is None else entry.tier

    def is_writing(self, donor_id: str) -> bool:
        """Whether the donor's file is still to be written."""
        entry = self._entries.get(donor_id)
        return entry is not None and entry.file == "writing"

    def resting(self) -> frozenset[str]:
        """Donors that can be found but not leased, because they are on disk alone or still being read back."""
        with self._lock:
            return frozenset(donor_id for donor_id, entry in self._entries.items() if entry.is_resting)

    def stats(self) -> CatalogStats:
        with self._lock:
            entries = self._entries.values()
            return CatalogStats(
                ready=sum(entry.is_readable for entry in entries),
                saving=sum(entry.state == "saving" for entry in entries),
                leases=sum(entry.leases for entry in entries),
                used_bytes=self._used[Tier.HOST] * self.capacities.bytes_per_token,
                device_blocks_used=self._used[Tier.DEVICE],
                resting=sum(entry.is_resting for entry in entries),
                disk_bytes_used=self._used[Tier.DISK],
                **self._counts,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def _remove_where(self, may_go: Callable[[_Entry], bool], donor_id: str) -> bool:
        with self._lock:
            is_going = donor_id in self._entries and may_go(self._entries[donor_id])
            if is_going:
                self._remove(donor_id)
            return is_going

    # -- the caller of what follows holds the lock -------------------------------------------------------------------

    def _enter(self, donor_id: str, entry: _Entry, generation: int) -> None:
        self._entries[donor_id] = entry
        self._count_room(entry, 1)
        if generation:
            self.generations[donor_id] = generation

    def _remove(self, donor_id: str, *, evicted: bool = False) -> None:
        entry = self._entries.pop(donor_id)
        self._count_room(entry, -1)
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        self.generations.pop(donor_id, None)

    def _make_ready(self, donor_id: str, entry: _Entry) -> None:
        """The donor may be leased, or fetched, and counts as just used."""
        entry.state = "ready"
        entry.last_use = next(self._ticks)
        self._eviction[entry.tier].added(donor_id, entry)

    def _count_use(self, donor_id: str, entry: _Entry) -> None:
        entry.last_use = next(self._ticks)
        entry.uses += 1
        self._eviction[entry.tier].used(donor_id)

    def _move(self, donor_id: str, tier: Tier, *, evicted: bool = False) -> None:
        """The donor takes its room in `tier` from now on, and is a candidate there when it is ready."""
        entry = self._entries[donor_id]
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        with self._recounting(entry):
            entry.tier = tier
        if entry.state == "ready":
            self._eviction[tier].added(donor_id, entry)

    @contextmanager
    def _recounting(self, entry: _Entry) -> Iterator[None]:
        """Counts the entry's room anew around a change of it."""
        self._count_room(entry, -1)
        yield
        self._count_room(entry, 1)

    def _count_room(self, entry: _Entry, sign: int) -> None:
        """Adds the entry's room to what is used, or with -1 takes it off."""
        takes = {
            Tier.DEVICE: entry.tier is Tier.DEVICE or entry.is_promoting,
            Tier.HOST: entry.tier is Tier.HOST,
            Tier.DISK: entry.file != "none",
        }
        for tier, is_taken in takes.items():
            if is_taken:
                self._used[tier] += sign * self.capacities.room(tier, entry.tokens)

    def _free(self, tier: Tier) -> int:
        is_full = tier is Tier.DISK and time.monotonic() < self._full_until
        return (self._full_at if is_full else self.capacities.limit(tier)) - self._used[tier]

    def _movable(self, tier: Tier, but: str = "") -> Iterator[str]:
        """Donors of `tier` that may go, `but` this one, in the order in which they should."""
        candidates = self._eviction[tier].candidates()
        return (each for each in candidates if each != but and self._entries[each].is_movable)

    def _search(self, tokens: int, leaving: str = "") -> TierMoves | None:
        in_order = (_RoomSearch(self, tokens, leaving=leaving).on(tier) for tier in (Tier.DEVICE, Tier.HOST))
        return next((moves for moves in in_order if moves is not None), None)

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
        written, dropped = moves.written, moves.dropped
        for donor_id in donor_ids if self._writes_files else ():
            entry = self._entries[donor_id]
            if entry.file == "none" and (victims := self._make_file_room(entry.tokens)) is not None:
                with self._recounting(entry):
                    entry.file = "writing"
                written, dropped = (*written, donor_id), dropped + victims
        released = tuple(donor_id for donor_id in moves.released if donor_id not in dropped)
        return replace(moves, written=written, dropped=dropped, released=released)

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


class _RoomSearch:
    """Looks once for the room of one donor of `tokens` tokens. Nothing moves until its result is applied."""

    def __init__(self, catalog: DonorCatalog, tokens: int, *, is_held: bool = False, leaving: str = "") -> None:
        """`is_held`: the donor has a place already. `leaving`: a donor that leaves memory in any case."""
        self._limits, self._entries, self._tokens = catalog.capacities, catalog._entries, tokens
        self._leaving = [leaving] if leaving else []
        self._places = 1 if is_held else self._limits.max_donors - len(self._entries)
        self._free = {tier: catalog._free(tier) for tier in Tier}
        for donor_id in self._leaving:
            tier = self._entries[donor_id].tier
            self._free[tier] += self._limits.room(tier, self._entries[donor_id].tokens)
        self._movable = {tier: catalog._movable(tier, leaving) for tier in Tier}

    def on(self, tier: Tier) -> TierMoves | None:
        """What makes room for the donor in the arena or in host memory; None when nothing does.

        Of those displaced from the arena, the one used last has the first claim on host memory. Those that do not fit
        there leave.
        """
        needed = self._limits.room(tier, self._tokens)
        if needed > self._limits.limit(tier):
            return None
        displaced = self._take(tier, needed - self._free[tier])
        if displaced is None or tier is Tier.HOST:
            return None if displaced is None else self._moves(tier, [], displaced)
        offloaded, leaving, free = list[str](), list[str](), self._free[Tier.HOST]
        for donor_id in reversed(displaced):
            tokens = self._entries[donor_id].tokens
            taken = self._take(Tier.HOST, tokens - free)
            if taken is None:
                leaving.append(donor_id)
                continue
            leaving += taken
            free += sum(self._entries[each].tokens for each in taken) - tokens
            offloaded.insert(0, donor_id)
        return self._moves(tier, offloaded, leaving)

    def _take(self, tier: Tier, missing: int) -> list[str] | None:
        """The tier's next donors that together hold what is `missing`; None, and none is taken, when they are too
        few."""
        taken: list[str] = []
        while missing > 0:
            donor_id = next(self._movable[tier], None)
            if donor_id is None:
                self._movable[tier] = iter(taken)
                return None
            taken.append(donor_id)
            missing -= self._limits.room(tier, self._entries[donor_id].tokens)
        return taken

    def _moves(self, tier: Tier, offloaded: list[str], leaving: list[str]) -> TierMoves | None:
        """The moves, with more donors that go where the catalog has no place left; None when there are too few."""
        leaving = self._leaving + leaving
        released = [each for each in leaving if self._entries[each].file == "held"]
        dropped = [each for each in leaving if each not in released]
        # Donors on disk go first, then those that leave memory anyway, the host's, those on their way there, and the
        # device's.
        on_device, on_host, on_disk = self._movable.values()
        more = chain(on_disk, released, on_host, offloaded, on_device)
        dropped += islice(more, max(0, 1 - self._places - len(dropped)))
        if self._places + len(dropped) < 1:
            return None
        kept, let_go = (tuple(each for each in ids if each not in dropped) for ids in (offloaded, released))
        return TierMoves(tier, kept, tuple(dropped), let_go)
