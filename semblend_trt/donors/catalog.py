"""DonorCatalog: the one owner of capacity. It runs on the scheduler and decides for every rank.

A donor is *saving* from `reserve` to `commit`, then *ready*. Only ready donors can be leased or evicted, and a leased
one cannot go.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.donors.eviction import EvictionPolicy, LruEviction
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError

if TYPE_CHECKING:
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
    state: DonorState = DonorState.SAVING
    leases: int = 0


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts at one moment; `used_bytes` includes what saving donors reserve, `evicted` counts since the start."""

    ready: int
    saving: int
    leases: int
    used_bytes: int
    byte_budget: int
    evicted: int


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
    """Which donors are held, how many bytes they take, and who reads them. Thread safe.

    `byte_budget` bounds the KV bytes of one rank, `bytes_per_token` is K and V of all layers of that rank.
    """

    def __init__(
        self, byte_budget: int, bytes_per_token: int, max_donors: int, eviction: EvictionPolicy | None = None
    ) -> None:
        if byte_budget < 0 or bytes_per_token < 1 or max_donors < 1:
            raise ConfigurationError(
                f"donor catalog with byte_budget {byte_budget}, bytes_per_token {bytes_per_token} and max_donors "
                f"{max_donors}; the budget must be >= 0, the others >= 1"
            )
        self._byte_budget = byte_budget
        self._bytes_per_token = bytes_per_token
        self._max_donors = max_donors
        self._eviction = eviction or LruEviction()
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._reserved_tokens = 0
        self._evicted = 0

    def reserve(self, donor_id: str, namespace_key: str, tokens_upper_bound: int) -> list[str]:
        """Makes room for a donor of at most `tokens_upper_bound` tokens; returns the donors dropped for it.

        Raises ValueError when the id is taken or the bound is below 1, and CapacityError when even dropping every
        unleased donor would not do; nothing has changed then.
        """
        if tokens_upper_bound < 1:
            raise ValueError(f"donor {donor_id} reserves {tokens_upper_bound} tokens; at least 1 is needed")
        with self._lock:
            if donor_id in self._entries:
                raise ValueError(f"donor {donor_id} is already held; use another id or drop it first")
            victims = self._victims(donor_id, tokens_upper_bound)
            for victim in victims:
                self._remove(victim)
            self._evicted += len(victims)
            self._entries[donor_id] = _Entry(namespace_key, tokens_upper_bound)
            self._reserved_tokens += tokens_upper_bound
            return victims

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
            self._reserved_tokens -= entry.tokens - len(tokens)
            entry.tokens, entry.state = len(tokens), DonorState.READY
            self._eviction.added(donor_id)

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
            self._eviction.used(donor_id)
            return Lease(self, donor_id)

    def touch(self, donor_id: str) -> None:
        """Counts as a use of a ready donor; nothing happens for any other."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is not None and entry.state is DonorState.READY:
                self._eviction.used(donor_id)

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

    def stats(self) -> CatalogStats:
        with self._lock:
            entries = self._entries.values()
            ready = sum(entry.state is DonorState.READY for entry in entries)
            return CatalogStats(
                ready=ready,
                saving=len(entries) - ready,
                leases=sum(entry.leases for entry in entries),
                used_bytes=self._reserved_tokens * self._bytes_per_token,
                byte_budget=self._byte_budget,
                evicted=self._evicted,
            )

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _victims(self, donor_id: str, tokens: int) -> list[str]:
        """The donors whose drop makes room for `tokens`, none of which is dropped yet."""
        budget = self._byte_budget // self._bytes_per_token
        missing_tokens = self._reserved_tokens + tokens - budget
        missing_places = len(self._entries) + 1 - self._max_donors
        victims: list[str] = []
        candidates = self._eviction.candidates() if tokens <= budget else iter(())
        while missing_tokens > 0 or missing_places > 0:
            victim = next(candidates, None)
            if victim is None:
                raise CapacityError(
                    f"donor {donor_id} needs {tokens * self._bytes_per_token} bytes of a budget of "
                    f"{self._byte_budget} and one place of {self._max_donors}; the donors that are leased or being "
                    "saved leave no room, raise SEMBLEND_HOST_BYTES or SEMBLEND_MAX_DONORS"
                )
            entry = self._entries[victim]
            if not entry.leases:
                victims.append(victim)
                missing_tokens -= entry.tokens
                missing_places -= 1
        return victims

    def _remove(self, donor_id: str) -> None:
        self._reserved_tokens -= self._entries.pop(donor_id).tokens
        self._eviction.removed(donor_id)

    def _end_lease(self, lease: Lease) -> None:
        with self._lock:
            if not lease._released:
                lease._released = True
                self._entries[lease.donor_id].leases -= 1
