"""DonorCatalog: the one owner of capacity, in all tiers. It runs on the scheduler and decides for every rank.

A donor is *saving* from `reserve` to `commit`, then *ready*. Only ready donors can be leased, moved or evicted, and a
leased one neither moves down nor goes. A donor counts in one tier only: from the decision to offload it on, in the
host's; while it is promoted, in both. A file is a copy beside its tier, until memory lets the donor go.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from semblend_trt.donors.donor_file import FileSize
from semblend_trt.donors.donor_table import (
    Capacities,
    CatalogStats,
    DonorState,
    Entry,
    FileState,
    Holdings,
    Placement,
    Tier,
    place_on_device,
    place_on_host,
)
from semblend_trt.donors.eviction import DonorHistory, EvictionPolicy, LruEviction
from semblend_trt.errors import DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.donors.block_kind import KindMix


class Lease:
    """Keeps one donor from being dropped until `release`. Releasing twice is once."""

    def __init__(self, donor_id: str, end: Callable[[Lease], None]) -> None:
        """`end` is called by every release; it asks `released` and calls `ended` under its owner's lock."""
        self.donor_id = donor_id
        self._end = end
        self._released = False

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        self._end(self)

    def ended(self) -> None:
        """Marks the lease as released."""
        self._released = True


__all__ = ["CatalogStats", "DonorCatalog", "DonorState", "Lease"]

# A donor is promoted before its room on the host is free: that may cost so small a share of the host's tokens.
_PROMOTION_SHARE = 16


class DonorCatalog:
    """Which donors are held, in which tier, what room they take, and who reads them. Thread safe.

    `byte_budget` and the other sizes are those of `Capacities`; `eviction` makes the order of one tier, `clock` gives
    seconds.
    """

    def __init__(
        self,
        byte_budget: int,
        bytes_per_token: int,
        max_donors: int,
        eviction: Callable[[], EvictionPolicy] = LruEviction,
        *,
        device_blocks: int = 0,
        block_size: int = 1,
        disk_bytes: int = 0,
        num_layers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        file_size = FileSize(num_layers, bytes_per_token)
        limits = Capacities(byte_budget, bytes_per_token, max_donors, device_blocks, block_size, disk_bytes, file_size)
        self._holdings = Holdings(limits, eviction, clock)
        self._lock = threading.Lock()

    # -- a donor's life --------------------------------------------------------------------------------------------

    def reserve(self, donor_id: str, namespace_key: str, tokens_upper_bound: int, text: bytes = b"") -> Placement:
        """Makes room for a donor of at most `tokens_upper_bound` tokens, on the device where that is possible.

        `text` names the donor's text for policies that know it again. Returns its tier and who moved or was dropped for
        it. Raises ValueError when the id is taken, and CapacityError when no unleased donors make enough room; nothing
        has changed then.
        """
        with self._lock:
            held = self._holdings
            if donor_id in held.entries:
                raise ValueError(f"donor {donor_id} is already held; use another id or drop it first")
            placement = held.apply(held.place(donor_id, tokens_upper_bound))
            history = DonorHistory(tokens_upper_bound, text=text)
            held.enter(donor_id, Entry(namespace_key, placement.tier, history))
            return held.with_files(placement, (donor_id,)) if placement.tier is Tier.HOST else placement

    def commit(self, donor_id: str, tokens: int) -> None:
        """Makes a saving donor ready with the `tokens` it really holds and gives the rest back.

        `tokens` are at most as many as were reserved. Raises DonorUnavailableError when the donor is not saving.
        """
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is None or entry.state is not DonorState.SAVING:
                raise DonorUnavailableError(f"donor {donor_id} is not being saved and cannot be committed")
            self._holdings.resize(entry, tokens)
            self._holdings.make_ready(donor_id)

    def cancel(self, donor_id: str) -> bool:
        """Gives the room of a saving donor back; False when there is no such donor or it is ready."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is None or entry.state is not DonorState.SAVING:
                return False
            self._holdings.remove(donor_id)
            return True

    def lease(self, donor_id: str) -> Lease:
        """Holds a ready donor and counts as a use; raises DonorUnavailableError when it is not in memory."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is None or not entry.is_readable:
                raise DonorUnavailableError(f"donor {donor_id} is not held and cannot be leased")
            entry.leases += 1
            self._holdings.count_use(donor_id)
            return Lease(donor_id, self._end_lease)

    def touch(self, donor_id: str) -> None:
        """Counts as a use of a ready donor; nothing happens for any other."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is not None and entry.state is DonorState.READY:
                self._holdings.count_use(donor_id)

    def describe(self, donor_id: str, kinds: KindMix) -> None:
        """Learns of what kinds the donor's text is; nothing happens when it is gone."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is not None:
                entry.history.kinds = kinds
                self._holdings.described(donor_id)

    def drop(self, donor_id: str) -> bool:
        """Drops a ready donor; False, and nothing happens, when it is read, on its way somewhere, or not held."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is None or not entry.is_movable:
                return False
            self._holdings.remove(donor_id)
            return True

    # -- files, and ways up ----------------------------------------------------------------------------------------

    def begin_writing(self) -> None:
        """From now on donors that come into host memory get a file where there is room for one."""
        with self._lock:
            self._holdings.writes_files = self._holdings.capacities.disk_bytes > 0

    def adopt(self, donor_id: str, namespace_key: str, tokens: int, text: bytes) -> tuple[str, ...] | None:
        """Takes in a donor whose file was found, and returns who of those on disk alone went for it.

        None, and nothing has changed, when the id is taken or they do not make enough room.
        """
        with self._lock:
            held = self._holdings
            if donor_id in held.entries:
                return None
            dropped = held.make_file_room(tokens, has_place=False)
            if dropped is not None:
                history = DonorHistory(tokens, text=text)
                held.enter(donor_id, Entry(namespace_key, Tier.DISK, history, file=FileState.HELD))
                held.make_ready(donor_id)
            return dropped

    def written(self, donor_id: str, succeeded: bool) -> None:
        """The donor's file is there, or will not be."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is None or entry.file is not FileState.WRITING:
                return
            if succeeded:
                entry.file = FileState.HELD
            else:
                self._holdings.lose_file(entry)

    def fetch(self, donor_id: str) -> Placement | None:
        """Makes room on the host for a donor that is on disk alone; None when it is not, or there is no room.

        It cannot be leased until `fetched` says that it has been read back.
        """
        with self._lock:
            held, entry = self._holdings, self._holdings.entries.get(donor_id)
            if entry is None or entry.tier is not Tier.DISK or not entry.is_movable:
                return None
            placement = place_on_host(held.size(entry), held.find_room(has_place=True))
            if placement is None:
                return None
            entry.state = DonorState.FETCHING
            placement = held.apply(placement)
            held.move(donor_id, Tier.HOST)
            return placement

    def fetched(self, donor_id: str, succeeded: bool) -> bool:
        """The donor has been read back, or is lost; False when it was not being fetched."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            if entry is None or entry.state is not DonorState.FETCHING:
                return False
            if succeeded:
                self._holdings.make_ready(donor_id, is_new=False)
                self._holdings.count("fetched")
            else:
                self._holdings.remove(donor_id)
            return True

    def promote(self, donor_id: str) -> Placement | None:
        """Makes room on the device for a donor of the host; None when it is not there, or too much would go for it.

        It stays readable on the host until `promoted` says that it has been copied.
        """
        with self._lock:
            held, entry = self._holdings, self._holdings.entries.get(donor_id)
            if entry is None or not entry.is_readable or entry.tier is not Tier.HOST or entry.is_promoting:
                return None
            size, limits = held.size(entry), held.capacities
            if entry.file is FileState.WRITING or size.blocks > limits.device_blocks:
                return None
            entry.is_promoting = True  # so that it does not make room for itself
            placement = place_on_device(size, held.find_room(has_place=True))
            lost = () if placement is None else placement.dropped
            if (
                placement is None
                or sum(held.entries[each].tokens for each in lost) > limits.host_tokens // _PROMOTION_SHARE
            ):
                entry.is_promoting = False
                return None
            held.used[Tier.DEVICE] += size.blocks
            return held.apply(placement)

    def promoted(self, donor_id: str, succeeded: bool) -> None:
        """The donor is on the device and no longer on the host, or still where it was."""
        with self._lock:
            held, entry = self._holdings, self._holdings.entries.get(donor_id)
            if entry is None or not entry.is_promoting:
                return
            entry.is_promoting = False
            held.used[Tier.DEVICE] -= held.size(entry).blocks
            if succeeded:
                held.move(donor_id, Tier.DEVICE)
                held.count("promoted")

    # -- what is held ----------------------------------------------------------------------------------------------

    def state(self, donor_id: str) -> DonorState | None:
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            return None if entry is None else entry.state

    def tier(self, donor_id: str) -> Tier | None:
        """The tier in which the donor counts; None when it is not held."""
        with self._lock:
            entry = self._holdings.entries.get(donor_id)
            return None if entry is None else entry.tier

    def resting(self) -> frozenset[str]:
        """Donors that can be found but not leased, because they are on disk alone or still being read back."""
        with self._lock:
            return self._holdings.resting()

    def stats(self) -> CatalogStats:
        with self._lock:
            return self._holdings.stats()

    def __len__(self) -> int:
        with self._lock:
            return len(self._holdings.entries)

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            if not lease.released:
                lease.ended()
                self._holdings.entries[lease.donor_id].leases -= 1
