"""What one rank holds of donors in memory. It obeys the scheduler's catalog and decides nothing.

Page-locked memory is allocated once and given out in ranges: locking memory would hold up running requests. Torch's
allocator would round every donor up to a power of two and keep freed memory."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.device import wait
from kernels.layout import ContiguousKv, by_token
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernels.device import Event, Stream
    from kernels.layout import KvGeometry, PagedKv
    from semblend_trt.donors.device_tier import DeviceTier


def arena_blocks(byte_budget: int, geometry: KvGeometry, dtype: torch.dtype) -> int:
    """Return a device tier's blocks within `byte_budget`; scheduler and workers both use this."""
    return byte_budget // (geometry.bytes_per_token(dtype) * geometry.block_size)


@dataclass(frozen=True, slots=True)
class HostKv:
    """`parts`: [layers, kv_factor, kv_heads, tokens of the part, head_dim] each, in token order."""

    parts: tuple[ContiguousKv, ...]

    @property
    def capacity(self) -> int:
        """Positions of all parts together."""
        return sum(part.capacity for part in self.parts)

    def parts_of(self, start: int, length: int) -> Iterator[tuple[ContiguousKv, int, int, int]]:
        """Yield each part of positions `start .. start + length - 1`: its first index there, its first position after
        `start`, and how many."""
        first, end = 0, start + length
        for part in self.parts:
            begin, stop = max(start, first), min(end, first + part.capacity)
            if begin < stop:
                yield part, begin - first, begin - start, stop - begin
            first += part.capacity


class HostMemory:
    """`rows` rows of `row_bytes` bytes, page-locked for the GPU with `lock`; not thread safe. Elsewhere pages are taken
    when first written. Every free row is usable: scattered room becomes several ranges.

    Raises ConfigurationError when the memory is not available."""

    def __init__(self, rows: int, row_bytes: int, *, lock: bool) -> None:
        size, physical = rows * row_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if lock and size > physical:
            raise ConfigurationError(
                f"SEMBLEND_HOST_BYTES is {size}; this machine has {physical} bytes of memory to lock, lower it"
            )
        try:
            self._rows = torch.empty((rows, row_bytes), dtype=torch.uint8)
        except RuntimeError as error:
            raise ConfigurationError(f"{size} bytes of host memory cannot be had; lower SEMBLEND_HOST_BYTES") from error
        self._holes = [range(rows)] if rows else []
        if lock and size:
            runtime, address = torch.cuda.cudart(), self._rows.data_ptr()
            if code := int(runtime.cudaHostRegister(address, size, 0)):
                raise ConfigurationError(
                    f"{size} bytes of host memory cannot be page-locked (CUDA error {code}); lower SEMBLEND_HOST_BYTES"
                )
            # The system takes the pages back at exit; earlier, they must not be freed locked.
            weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    @property
    def free(self) -> int:
        """Rows that are not taken."""
        return sum(map(len, self._holes))

    def take(self, rows: int) -> list[range]:
        """Return ranges of `rows` rows, at most those that are free: one range if possible, else few."""
        fitting = [hole for hole in self._holes if len(hole) >= rows]
        chosen = [min(fitting, key=len)] if fitting else sorted(self._holes, key=len, reverse=True)
        taken: dict[int, range] = {}
        for hole in chosen:
            taken[hole.start] = part = hole[:rows]
            rows -= len(part)
        self._holes = [rest for hole in self._holes if (rest := hole[len(taken.get(hole.start, ())) :])]
        return [each for each in taken.values() if each]

    def give_back(self, ranges: list[range]) -> None:
        """Free ranges that were taken."""
        holes: list[range] = []
        for each in sorted((*self._holes, *ranges), key=lambda each: each.start):
            if holes and holes[-1].stop == each.start:
                each = range(holes.pop().start, each.stop)
            holes.append(each)
        self._holes = holes

    def view(self, part: range) -> torch.Tensor:
        """Return these rows, uint8 [rows, row_bytes]."""
        return self._rows[part.start : part.stop]


@dataclass(slots=True)
class _Slot:
    """One donor's room. During its copy there is no `kv`; `readers` threads queue work on it."""

    ranges: list[range]
    kv: HostKv | None = None
    readers: int = 0
    is_dropped: bool = False


class HostTier:
    """Donor KV of one geometry in host memory, at most `byte_budget` bytes. Thread safe; copies run outside the lock.

    A donor is in memory as [layers, tokens, kv_factor, kv_heads, head_dim], so any run of tokens of one layer is one
    copy to a device. It lies in one or several parts of the memory, which `lock` locks for a GPU. A GPU reads it
    asynchronously: callers of `read_until` say when such reads end, and no other donor is written before."""

    def __init__(self, byte_budget: int, geometry: KvGeometry, dtype: torch.dtype, *, lock: bool = False) -> None:
        """Take the memory. Raises ConfigurationError when it is not available."""
        self.byte_budget, self._geometry, self._dtype = byte_budget, geometry, dtype
        self._token_bytes = geometry.bytes_per_token(dtype)
        self._tokens = byte_budget // self._token_bytes
        self._memory = HostMemory(self._tokens, self._token_bytes, lock=lock)
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}
        self._reads: list[Event] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of donors that are held or being copied; a dropped one counts until its copy ends."""
        return (self._tokens - self._memory.free) * self._token_bytes

    @contextmanager
    def writing(self, donor_id: str, tokens: int, stream: Stream | None = None) -> Iterator[HostKv]:
        """Give memory for `tokens` positions of a new donor.

        The donor is held once the `with` block ends; its bytes must be there by then. Reads of the memory's former
        donor end before the block begins; with `stream`, which alone may then write, that stream waits for them
        instead. Raises ValueError for a taken id, and CapacityError without room in the budget. Raises
        DonorUnavailableError at the end when the donor was dropped meanwhile. After an error nothing is held."""
        with self._lock:
            if donor_id in self._slots:
                raise ValueError(f"donor {donor_id} is already in host memory; drop it first")
            if tokens > self._memory.free:
                raise CapacityError(
                    f"donor {donor_id} needs {tokens * self._token_bytes} bytes; {self.byte_budget - self.used_bytes} "
                    f"of {self.byte_budget} are free in host memory, drop donors or raise SEMBLEND_HOST_BYTES"
                )
            slot = self._slots[donor_id] = _Slot(self._memory.take(tokens))
        try:
            held = HostKv(tuple(ContiguousKv(self._view(part)) for part in slot.ranges))
            with self._lock:
                self._reads = reads = [read for read in self._reads if not read.query()]
            wait(stream, reads)
            for read in reads if stream is None else ():
                read.synchronize()
            yield held
        except BaseException:
            self._end_copy(donor_id, slot, None)
            raise
        if not self._end_copy(donor_id, slot, held):
            raise DonorUnavailableError(f"donor {donor_id} was dropped while it was being saved")

    @contextmanager
    def reading(self, donor_id: str) -> Iterator[HostKv]:
        """Give the donor's KV, which stays its own within the block; for queued reads see `read_until`.

        Raises DonorUnavailableError when the donor is not held."""
        with self._lock:
            slot = self._slots.get(donor_id)
            if slot is None or slot.kv is None:
                raise DonorUnavailableError(f"donor {donor_id} is not in host memory")
            slot.readers += 1
        try:
            yield slot.kv
        finally:
            with self._lock:
                slot.readers -= 1
                if slot.is_dropped and not slot.readers:
                    self._memory.give_back(slot.ranges)

    def read_until(self, end: Event | None) -> None:
        """Note that reads queued within `reading` end with `end`; None where they have ended."""
        if end is not None:
            with self._lock:
                self._reads = [*(read for read in self._reads if not read.query()), end]

    def drop(self, donor_id: str) -> bool:
        """Free the donor, or stop its save, whose room is free once its copy ends; False without one."""
        with self._lock:
            slot = self._slots.pop(donor_id, None)
            if slot is None:
                return False
            slot.is_dropped = True
            if slot.kv is not None and not slot.readers:
                self._memory.give_back(slot.ranges)
            return True

    def clear(self) -> None:
        for donor_id in list(self._slots):
            self.drop(donor_id)

    def __contains__(self, donor_id: object) -> bool:
        with self._lock:
            slot = self._slots.get(donor_id) if isinstance(donor_id, str) else None
            return slot is not None and slot.kv is not None

    def _view(self, part: range) -> torch.Tensor:
        return by_token(self._memory.view(part).view(self._dtype), self._geometry, self._geometry.num_layers)

    def _end_copy(self, donor_id: str, slot: _Slot, kv: HostKv | None) -> bool:
        """Make the copied donor readable. Without `kv`, or when it was dropped, free its room and return False."""
        with self._lock:
            is_held = self._slots.get(donor_id) is slot
            if is_held and kv is not None:
                slot.kv = kv
                return True
            if is_held:
                del self._slots[donor_id]
            self._memory.give_back(slot.ranges)
            return False


class DonorStore:
    """The host tier and the device tier, if any. Thread safe.

    A donor that moves stays readable: it is in its new tier before it leaves the old one."""

    def __init__(self, host: HostTier, device: DeviceTier | None) -> None:
        self.host = host
        self.device = device

    @contextmanager
    def reading(self, donor_id: str) -> Iterator[PagedKv | HostKv]:
        """Give the donor's KV, from the device where it is there. Queue the reading work within the block.

        The caller announces the end of queued reads of host memory by `HostTier.read_until`. Raises
        DonorUnavailableError when neither tier holds the donor."""
        with ExitStack() as reads:
            yield self._readable(donor_id, reads)

    def offload(self, donor_id: str, copy: Callable[[PagedKv, int, HostKv], None]) -> bool:
        """Move a donor of the device to the host; False when it is not there, or was dropped meanwhile.

        `copy(source, tokens, held)` fills `held`, and writes nothing more once it returns or raises. After an error
        neither tier holds the donor: the catalog has given its blocks away."""
        if self.device is None or donor_id not in self.device:
            return False
        try:
            tokens = self.device.tokens_of(donor_id)
            with (
                self.device.reading(donor_id) as source,
                self.host.writing(donor_id, tokens) as held,
            ):
                copy(source, tokens, held)
        except Exception:
            # Nothing is lost where the scheduler has dropped it meanwhile.
            if not self.device.drop(donor_id):
                return False
            raise
        if not self.device.drop(donor_id):
            self.host.drop(donor_id)
            return False
        return True

    def promote(self, donor_id: str, copy: Callable[[HostKv, PagedKv], None]) -> None:
        """Copy a donor of the host to the device, then drop it from the host.

        `copy(held, target)` fills `target` before it returns. Raises DonorUnavailableError when the host does not hold
        the donor, CapacityError without device room, and what `copy` raises; the host then holds the donor as before. A
        drop meanwhile is a DonorUnavailableError too; neither tier holds the donor then."""
        device = self.device_tier()
        with self.host.reading(donor_id) as held, device.writing(donor_id, held.capacity) as target:
            copy(held, target)
        if not self.host.drop(donor_id):
            device.drop(donor_id)
            raise DonorUnavailableError(f"donor {donor_id} was dropped while it was being promoted")

    def drop(self, donor_id: str) -> bool:
        """Drop the donor, or stop its save or its way down; False when it is missing."""
        on_device = self.device is not None and self.device.drop(donor_id)
        return self.host.drop(donor_id) or on_device

    def device_tier(self) -> DeviceTier:
        """Return the device tier; CapacityError where this rank has none."""
        if self.device is None:
            raise CapacityError("this rank has no device tier; set SEMBLEND_DEVICE_BYTES alike on every rank")
        return self.device

    def clear(self) -> None:
        if self.device is not None:
            self.device.clear()
        self.host.clear()

    def _readable(self, donor_id: str, reads: ExitStack) -> PagedKv | HostKv:
        if self.device is None:
            return reads.enter_context(self.host.reading(donor_id))
        with suppress(DonorUnavailableError):
            return reads.enter_context(self.device.reading(donor_id))
        with suppress(DonorUnavailableError):  # never on the device, or moved down since: the host has it already
            return reads.enter_context(self.host.reading(donor_id))
        return reads.enter_context(self.device.reading(donor_id))  # moved up since, or held nowhere
