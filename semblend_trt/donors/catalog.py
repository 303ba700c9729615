"""DonorCatalog: the one owner of capacity, in both tiers. It runs on the scheduler and decides for every rank.

A donor is *saving* from `reserve` to `commit`, then *ready*. Only ready donors can be leased, moved or evicted, and a
leased one neither moves nor goes. A donor counts in one tier only: from the decision to demote it on, in the host's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.donors.eviction import EvictionPolicy, LruEviction
from semblend_trt.donors.placement import Candidates, FreeRoom, Placement, Size, Tier, place_on_device, place_on_host
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt


class DonorState(str, Enum):
    """SAVING: room is reserved, nobody may read. READY: its KV is held."""

    SAVING = "saving"
    READY = "ready"


@dataclass(slots=True)
class _Entry:
    namespace_key: str
    tokens: int
    tier: Tier
    state: DonorState = DonorState.SAVING
    leases: int = 0


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts at one moment. `used_bytes` (of `byte_budget`, host) and `device_blocks_used` (of `device_blocks`) include
    what saving donors reserve; `evicted` and `demoted` count since the start."""

    ready: int
    saving: int
    leases: int
    used_bytes: int
    byte_budget: int
    evicted: int
    demoted: int = 0
    device_blocks_used: int = 0
    device_blocks: int = 0


class Lease:
    """Keeps one donor from being dropped until `release`, or the end of a `with` block. Releasing twice is once."""

    def __init__(self, catalog: DonorCatalog, donor_id: str) -> None:
        self.donor_id = donor_id
        self._catalog = catalog
        self._released = False

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        self._catalog._end_lease(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class DonorCatalog:
    """Which donors are held, in which tier, what room they take, and who reads them. Thread safe.

    `byte_budget` bounds the KV bytes of one rank on the host, `bytes_per_token` is K and V of all layers of that rank.
    The arena on the card has `device_blocks` blocks of `block_size` tokens. `eviction` makes the order of one tier.
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
    ) -> None:
        if byte_budget < 0 or bytes_per_token < 1 or max_donors < 1 or device_blocks < 0 or block_size < 1:
            raise ConfigurationError(
                f"donor catalog with byte_budget {byte_budget}, bytes_per_token {bytes_per_token}, max_donors "
                f"{max_donors}, device_blocks {device_blocks} and block_size {block_size}; budget and device_blocks "
                "must be >= 0, the others >= 1"
            )
        self._byte_budget = byte_budget
        self._bytes_per_token = bytes_per_token
        self._max_donors = max_donors
        self._device_blocks = device_blocks
        self._block_size = block_size
        self._eviction = {tier: eviction() for tier in Tier}
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._used = dict.fromkeys(Tier, 0)  # blocks of the arena, tokens of the host
        self._evicted = 0
        self._demoted = 0

    def reserve(self, donor_id: str, namespace_key: str, tokens_upper_bound: int) -> Placement:
        """Makes room for a donor of at most `tokens_upper_bound` tokens, on the device where that is possible.

        Returns its tier and who was demoted or dropped for it. Raises ValueError when the id is taken or the bound is
        below 1, and CapacityError when no unleased donors make enough room; nothing has changed then.
        """
        if tokens_upper_bound < 1:
            raise ValueError(f"donor {donor_id} reserves {tokens_upper_bound} tokens; at least 1 is needed")
        with self._lock:
            if donor_id in self._entries:
                raise ValueError(f"donor {donor_id} is already held; use another id or drop it first")
            placement = self._place(donor_id, tokens_upper_bound)
            for victim in placement.dropped:
                self._remove(victim)
            for displaced in placement.demoted:
                self._move_to_host(displaced)
            self._evicted += len(placement.dropped)
            self._demoted += len(placement.demoted)
            self._entries[donor_id] = _Entry(namespace_key, tokens_upper_bound, placement.tier)
            self._used[placement.tier] += self._room(placement.tier, tokens_upper_bound)
            return placement

    def commit(self, donor_id: str, tokens: npt.NDArray[np.int32]) -> None:
        """Makes a saving donor ready with the `tokens` (int32 [n]) it really holds and gives the rest back.

        Raises DonorUnavailableError when the donor is not saving, ValueError when n is 0 or more than was reserved.
        """
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.state is not DonorState.SAVING:
                raise DonorUnavailableError(f"donor {donor_id} is not being saved and cannot be committed")
            if not 1 <= len(tokens) <= entry.tokens:
                raise ValueError(f"donor {donor_id} holds {len(tokens)} tokens; 1..{entry.tokens} were reserved")
            self._used[entry.tier] -= self._room(entry.tier, entry.tokens) - self._room(entry.tier, len(tokens))
            entry.tokens, entry.state = len(tokens), DonorState.READY
            self._eviction[entry.tier].added(donor_id)

    def cancel(self, donor_id: str) -> bool:
        """Gives the room of a saving donor back; False when there is no such donor or it is ready."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.state is not DonorState.SAVING:
                return False
            self._remove(donor_id)
            return True

    def lease(self, donor_id: str) -> Lease:
        """Holds a ready donor and counts as a use; raises DonorUnavailableError when it is not ready."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.state is not DonorState.READY:
                raise DonorUnavailableError(f"donor {donor_id} is not held and cannot be leased")
            entry.leases += 1
            self._eviction[entry.tier].used(donor_id)
            return Lease(self, donor_id)

    def touch(self, donor_id: str) -> None:
        """Counts as a use of a ready donor; nothing happens for any other."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is not None and entry.state is DonorState.READY:
                self._eviction[entry.tier].used(donor_id)

    def drop(self, donor_id: str) -> bool:
        """Drops a ready donor; False, and nothing happens, when it is leased, saving or not held."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.leases or entry.state is not DonorState.READY:
                return False
            self._remove(donor_id)
            return True

    def state(self, donor_id: str) -> DonorState | None:
        with self._lock:
            entry = self._entries.get(donor_id)
            return None if entry is None else entry.state

    def tier(self, donor_id: str) -> Tier | None:
        """The tier in which the donor counts; None when it is not held."""
        with self._lock:
            entry = self._entries.get(donor_id)
            return None if entry is None else entry.tier

    def stats(self) -> CatalogStats:
        with self._lock:
            entries = self._entries.values()
            ready = sum(entry.state is DonorState.READY for entry in entries)
            return CatalogStats(
                ready=ready,
                saving=len(entries) - ready,
                leases=sum(entry.leases for entry in entries),
                used_bytes=self._used[Tier.HOST] * self._bytes_per_token,
                byte_budget=self._byte_budget,
                evicted=self._evicted,
                demoted=self._demoted,
                device_blocks_used=self._used[Tier.DEVICE],
                device_blocks=self._device_blocks,
            )

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _place(self, donor_id: str, tokens: int) -> Placement:
        """Where the donor would go and who would make room, none of whom has moved yet."""
        size = self._size(tokens)
        host_tokens = self._byte_budget // self._bytes_per_token
        free = FreeRoom(
            tokens=host_tokens - self._used[Tier.HOST],
            blocks=self._device_blocks - self._used[Tier.DEVICE],
            donors=self._max_donors - len(self._entries),
        )
        placement = None
        if size.blocks <= self._device_blocks:
            placement = place_on_device(size, free, self._candidates(Tier.HOST), self._candidates(Tier.DEVICE))
        if placement is None and size.tokens <= host_tokens:
            placement = place_on_host(size, free, self._candidates(Tier.HOST), self._candidates(Tier.DEVICE))
        if placement is None:
            raise CapacityError(
                f"donor {donor_id} needs {tokens * self._bytes_per_token} bytes of a budget of {self._byte_budget}, or "
                f"{size.blocks} device blocks of {self._device_blocks}, and one place of {self._max_donors}; the "
                "donors that are leased or being saved leave no room, raise SEMBLEND_HOST_BYTES, "
                "SEMBLEND_DEVICE_BYTES or SEMBLEND_MAX_DONORS"
            )
        return placement

    def _candidates(self, tier: Tier) -> Candidates:
        def unleased() -> Iterator[tuple[str, Size]]:
            for donor_id in self._eviction[tier].candidates():
                entry = self._entries[donor_id]
                if not entry.leases:
                    yield donor_id, self._size(entry.tokens)

        return Candidates(unleased())

    def _size(self, tokens: int) -> Size:
        return Size(tokens, -(-tokens // self._block_size))

    def _room(self, tier: Tier, tokens: int) -> int:
        size = self._size(tokens)
        return size.blocks if tier is Tier.DEVICE else size.tokens

    def _move_to_host(self, donor_id: str) -> None:
        entry = self._entries[donor_id]
        self._used[Tier.DEVICE] -= self._room(Tier.DEVICE, entry.tokens)
        self._used[Tier.HOST] += self._room(Tier.HOST, entry.tokens)
        self._eviction[Tier.DEVICE].removed(donor_id)
        self._eviction[Tier.HOST].added(donor_id)
        entry.tier = Tier.HOST

    def _remove(self, donor_id: str) -> None:
        entry = self._entries.pop(donor_id)
        self._used[entry.tier] -= self._room(entry.tier, entry.tokens)
        self._eviction[entry.tier].removed(donor_id)

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            if not lease._released:
                lease._released = True
                self._entries[lease.donor_id].leases -= 1
