"""DonorCatalog: the one owner of capacity, in all tiers. It runs on the scheduler and decides for every rank.

A donor is *saving* from `reserve` to `commit`, then *ready*. Only ready donors can be leased, moved or evicted; a
leased one neither moves down nor goes. A donor counts in one tier: in the host's from the decision to offload it on,
and in both while it is promoted. A file is a second copy, and stays when the donor leaves memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from semblend_trt.donors.donor_table import (
    Capacities,
    CatalogStats,
    DonorState,
    DonorTable,
    Entry,
    FileState,
    RoomSearch,
    Tier,
    TierMoves,
)
from semblend_trt.donors.eviction import DonorHistory
from semblend_trt.errors import DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.config import Eviction

# A donor is promoted before its room on the host is free: that may cost so small a share of the host's tokens.
_PROMOTION_SHARE = 16


class Lease:
    """One reader's hold on one donor, which is not dropped before `release`. A second release does nothing."""

    def __init__(self, donor_id: str, end: Callable[[Lease], None]) -> None:
        self.donor_id = donor_id
        self.released = False
        self._end = end

    def release(self) -> None:
        self._end(self)


class DonorCatalog:
    """Which donors are held, in which tier, what room they take, and which are leased. Thread safe."""

    def __init__(self, capacities: Capacities, eviction: Eviction) -> None:
        self._table = DonorTable(capacities, eviction)
        self._lock = threading.Lock()

    # -- a donor's life --------------------------------------------------------------------------------------------

    def reserve(self, donor_id: str, tokens: int, continues: str = "") -> TierMoves:
        """Makes room for a donor of at most `tokens` tokens, on the device where that is possible.

        The donor that it `continues` leaves memory where another one would have to move without that. Raises ValueError
        when the id is taken, and CapacityError when no unleased donors make enough room; nothing has changed then.
        """
        with self._lock:
            table = self._table
            if donor_id in table.entries:
                raise ValueError(f"donor {donor_id} is already held; use another id or drop it first")
            uses = table.entries[continues].history.uses if continues in table.entries else 0
            moves = table.apply(table.place(donor_id, tokens, continues), continues)
            table.enter(donor_id, Entry(moves.tier, DonorHistory(tokens, uses=uses)))
            return table.with_files(moves, (donor_id,)) if moves.tier is Tier.HOST else moves

    def commit(self, donor_id: str, tokens: int) -> Tier:
        """Makes a saving donor ready with the `tokens` it really holds, at most those reserved, and frees the rest.

        Returns its tier.
        """
        with self._lock:
            entry = self._table.entries[donor_id]
            self._table.resize(entry, tokens)
            self._table.make_ready(donor_id)
            return entry.tier

    def cancel(self, donor_id: str) -> bool:
        """Gives the room of a saving donor back; False when there is no such donor or it is ready."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            if entry is None or entry.state is not DonorState.SAVING:
                return False
            self._table.remove(donor_id)
            return True

    def lease(self, donor_id: str) -> Lease:
        """Holds a ready donor and counts as a use; raises DonorUnavailableError when it is not in memory."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            if entry is None or not entry.is_readable:
                raise DonorUnavailableError(f"donor {donor_id} is not held and cannot be leased")
            entry.leases += 1
            self._table.count_use(donor_id)
            return Lease(donor_id, self._end_lease)

    def touch(self, donor_id: str) -> None:
        """Counts as a use of a ready donor; nothing happens for any other."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            if entry is not None and entry.state is DonorState.READY:
                self._table.count_use(donor_id)

    def drop(self, donor_id: str) -> bool:
        """Drops a ready donor; False, and nothing happens, when it is read, on its way somewhere, or not held."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            if entry is None or not entry.is_movable:
                return False
            self._table.remove(donor_id)
            return True

    # -- files, and ways up ----------------------------------------------------------------------------------------

    def begin_writing(self) -> None:
        """From now on donors that come into host memory get a file where there is room for one."""
        with self._lock:
            self._table.writes_files = self._table.capacities.disk_bytes > 0

    def adopt(self, donor_id: str, tokens: int) -> tuple[str, ...] | None:
        """Takes in a donor whose file was found; returns the donors on disk alone that were dropped for it.

        None, and nothing has changed, when the id is taken or they do not make enough room.
        """
        with self._lock:
            if donor_id in self._table.entries:
                return None
            dropped = self._table.make_file_room(tokens, is_held=False)
            if dropped is not None:
                entry = Entry(Tier.DISK, DonorHistory(tokens), file=FileState.HELD)
                self._table.enter(donor_id, entry)
                self._table.make_ready(donor_id)
            return dropped

    def written(self, donor_id: str, succeeded: bool, free: int | None = None) -> tuple[str, ...] | None:
        """The donor's file has been written, or could not be. Where the disk had no more than `free` bytes for it,
        returns the donors on disk alone that were dropped, behind which it is to be written again; else None."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            if entry is None or entry.file is not FileState.WRITING:
                return None
            self._table.set_file(entry, FileState.HELD if succeeded else FileState.NONE)
            return None if free is None else self._table.refuse_file(entry, free)

    def fetch(self, donor_id: str, *, may_drop: bool = True) -> TierMoves | None:
        """Makes room on the host for a donor that is on disk alone; None when it is not, or there is no room.

        Without `may_drop` only donors that have a file make room. The donor cannot be leased until `fetched` says that
        it has been read back.
        """
        with self._lock:
            table, entry = self._table, self._table.entries.get(donor_id)
            if entry is None or entry.tier is not Tier.DISK or not entry.is_movable:
                return None
            moves = RoomSearch(table, entry.history.tokens, is_held=True).on_host()
            if moves is None or (moves.dropped and not may_drop):
                return None
            entry.state = DonorState.FETCHING
            moves = table.apply(moves)
            table.move(donor_id, Tier.HOST)
            return moves

    def fetched(self, donor_id: str, succeeded: bool) -> bool:
        """The donor has been read back, or is lost. Returns False when it was not being fetched."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            if entry is None or entry.state is not DonorState.FETCHING:
                return False
            if succeeded:
                self._table.make_ready(donor_id, is_new=False)
                self._table.counts["fetched"] += 1
            else:
                self._table.remove(donor_id)
            return True

    def promote(self, donor_id: str) -> TierMoves | None:
        """Makes room on the device for a donor of the host; None when it is not there, or when too many tokens would be
        dropped for it.

        It stays readable on the host until `promoted` says that it has been copied.
        """
        with self._lock:
            table, entry = self._table, self._table.entries.get(donor_id)
            if entry is None or not entry.is_readable or entry.tier is not Tier.HOST or entry.is_promoting:
                return None
            if entry.file is FileState.WRITING:
                return None
            entry.is_promoting = True  # so that it does not make room for itself
            moves = RoomSearch(table, entry.history.tokens, is_held=True).on_device()
            lost = sum(table.entries[each].history.tokens for each in (() if moves is None else moves.dropped))
            if moves is None or lost > table.capacities.limit(Tier.HOST) // _PROMOTION_SHARE:
                entry.is_promoting = False
                return None
            table.used[Tier.DEVICE] += table.capacities.room(Tier.DEVICE, entry.history.tokens)
            return table.apply(moves)

    def promoted(self, donor_id: str, succeeded: bool) -> None:
        """The donor has been copied to the device and left the host, or stays where it was."""
        with self._lock:
            table, entry = self._table, self._table.entries.get(donor_id)
            if entry is None or not entry.is_promoting:
                return
            entry.is_promoting = False
            table.used[Tier.DEVICE] -= table.capacities.room(Tier.DEVICE, entry.history.tokens)
            if succeeded:
                table.move(donor_id, Tier.DEVICE)
                table.counts["promoted"] += 1

    # -- what is held ----------------------------------------------------------------------------------------------

    def tier(self, donor_id: str) -> Tier | None:
        """The tier in which the donor counts; None when it is not held."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            return None if entry is None else entry.tier

    def is_writing(self, donor_id: str) -> bool:
        """Whether the donor's file is still to be written."""
        with self._lock:
            entry = self._table.entries.get(donor_id)
            return entry is not None and entry.file is FileState.WRITING

    def resting(self) -> frozenset[str]:
        """Donors that can be found but not leased, because they are on disk alone or still being read back."""
        with self._lock:
            return self._table.resting()

    def stats(self) -> CatalogStats:
        with self._lock:
            return self._table.stats()

    def __len__(self) -> int:
        with self._lock:
            return len(self._table.entries)

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            if not lease.released:
                lease.released = True
                self._table.entries[lease.donor_id].leases -= 1
