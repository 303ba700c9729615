"""What one rank holds of donors in memory. It obeys the scheduler's catalog and decides nothing.

Page-locked memory is allocated once and given out in ranges: locking memory would hold up running requests. Torch's
allocator would round every donor up to a power of two and keep freed memory."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from kernels.device import current_stream, record, wait
from kernels.layout import ContiguousKv, PagedKv, by_token
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernels.device import Event, Stream
    from kernels.layout import KvGeometry


def arena_blocks(byte_budget: int, geometry: KvGeometry, dtype: torch.dtype) -> int:
    """Return a device tier's blocks within `byte_budget`."""
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


KvT = TypeVar("KvT")


@dataclass(slots=True, eq=False)
class HeldDonor(Generic[KvT]):
    """A donor of one tier: its `tokens` positions of `kv`, and what frees their room.

    `readers` threads queue work on it, its writer included; `written` and `reads` are the ends of their work."""

    kv: KvT
    tokens: int
    give_back: Callable[[], None]
    written: Event | None = None
    is_ready: bool = False
    is_dropped: bool = False
    readers: int = 1
    reads: list[Event] = field(default_factory=list)


class MemoryTier(ABC, Generic[KvT]):
    """Donor KV in memory that is allocated once. Thread safe; copies run outside the lock.

    A donor's room is free once it is dropped and no thread queues work on it. Queued work may still run then, so the
    room's next writer waits for it. Work on `device` is queued on the current stream of its `with` block."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Hold no donor; errors call the tier `name`."""
        self._name, self._device = name, device
        self._donors: dict[str, HeldDonor[KvT]] = {}
        self._fences: list[Event] = []
        self._lock = threading.RLock()

    @abstractmethod
    def _take(self, donor_id: str, tokens: int) -> HeldDonor[KvT]:
        """Take room for a new donor; CapacityError when too little is free."""

    @contextmanager
    def writing(self, donor_id: str, tokens: int, stream: Stream | None = None) -> Iterator[KvT]:
        """Give memory for `tokens` positions of a new donor, which is held, and readable, once the block ends.

        Reads of the memory's former donor end before: `stream`, by default the device's current one, waits for them,
        and on the CPU the caller does. Raises ValueError when the id is taken, and CapacityError when too little is
        free. Raises DonorUnavailableError at the end when the donor was dropped meanwhile. After an error nothing is
        held."""
        own = current_stream(self._device)
        stream = stream or own
        with self._lock:
            if donor_id in self._donors:
                raise ValueError(f"donor {donor_id} is already in {self._name}; drop it first")
            donor = self._donors[donor_id] = self._take(donor_id, tokens)
            self._fences = fences = [fence for fence in self._fences if not fence.query()]
        try:
            wait(stream, fences)
            for fence in fences if stream is None else ():
                fence.synchronize()
            yield donor.kv
        except BaseException:
            self._let_go(donor_id, donor)
            raise
        finally:
            self._end_work(donor, record(own))
        with self._lock:
            if donor.is_dropped:
                raise DonorUnavailableError(f"donor {donor_id} was dropped while it was being saved")
            donor.is_ready = True

    @contextmanager
    def reading(self, donor_id: str) -> Iterator[KvT]:
        """Give the donor's KV, which stays its own until everything queued on `device` within the block has run.

        Raises DonorUnavailableError when the donor is not held."""
        with self._lock:
            donor = self._ready(donor_id)
            donor.readers += 1
        stream = current_stream(self._device)
        try:
            wait(stream, [donor.written])
            yield donor.kv
        finally:
            self._end_work(donor, record(stream))

    def tokens_of(self, donor_id: str) -> int:
        """Return the positions that the donor holds; DonorUnavailableError when it is not held."""
        with self._lock:
            return self._ready(donor_id).tokens

    def drop(self, donor_id: str) -> bool:
        """Free the donor, or stop its save; its room is free once its last reader leaves. False without one."""
        with self._lock:
            donor = self._donors.get(donor_id)
            return donor is not None and self._let_go(donor_id, donor)

    def clear(self) -> None:
        with self._lock:
            for donor_id in list(self._donors):
                self.drop(donor_id)

    def __contains__(self, donor_id: object) -> bool:
        with self._lock:
            donor = self._donors.get(donor_id) if isinstance(donor_id, str) else None
            return donor is not None and donor.is_ready

    def _ready(self, donor_id: str) -> HeldDonor[KvT]:
        if (donor := self._donors.get(donor_id)) is None or not donor.is_ready:
            raise DonorUnavailableError(f"donor {donor_id} is not in {self._name}")
        return donor

    def _end_work(self, donor: HeldDonor[KvT], end: Event | None) -> None:
        """End a reader or writer of `donor` whose queued work ends with `end`."""
        with self._lock:
            donor.readers -= 1
            if end is not None:
                if donor.is_ready:
                    donor.reads = [*(read for read in donor.reads if not read.query()), end]
                else:
                    donor.written = end
            self._release_unread(donor)

    def _let_go(self, donor_id: str, donor: HeldDonor[KvT]) -> bool:
        """Drop `donor`, not another one of the same name; False when it was dropped before."""
        with self._lock:
            if self._donors.get(donor_id) is not donor:
                return False
            del self._donors[donor_id]
            donor.is_dropped = True
            self._release_unread(donor)
            return True

    def _release_unread(self, donor: HeldDonor[KvT]) -> None:
        if not donor.is_dropped or donor.readers:
            return
        donor.give_back()
        self._fences += donor.reads if donor.written is None else [*donor.reads, donor.written]


class HostTier(MemoryTier[HostKv]):
    """Donor KV of one geometry in host memory, at most `byte_budget` bytes.

    A donor is in memory as [layers, tokens, kv_factor, kv_heads, head_dim], so any run of tokens of one layer is one
    copy to a device. It lies in one or several parts of the memory, which `lock` locks for a GPU."""

    def __init__(self, byte_budget: int, geometry: KvGeometry, dtype: torch.dtype, *, lock: bool = False) -> None:
        """Take the memory. Raises ConfigurationError when it is not available."""
        super().__init__("host memory", torch.device("cpu"))
        self.byte_budget, self._geometry, self._dtype = byte_budget, geometry, dtype
        self._token_bytes = geometry.bytes_per_token(dtype)
        self._tokens = byte_budget // self._token_bytes
        self._memory = HostMemory(self._tokens, self._token_bytes, lock=lock)

    @property
    def used_bytes(self) -> int:
        """Bytes of donors that are held or being copied; a dropped one counts until its copy ends."""
        return (self._tokens - self._memory.free) * self._token_bytes

    def read_until(self, end: Event | None) -> None:
        """Note that reads by a GPU, queued within `reading`, end with `end`; None where they have ended."""
        if end is not None:
            with self._lock:
                self._fences = [*(fence for fence in self._fences if not fence.query()), end]

    def _take(self, donor_id: str, tokens: int) -> HeldDonor[HostKv]:
        if tokens > self._memory.free:
            raise CapacityError(
                f"donor {donor_id} needs {tokens * self._token_bytes} bytes; {self.byte_budget - self.used_bytes} "
                f"of {self.byte_budget} are free in host memory, drop donors or raise SEMBLEND_HOST_BYTES"
            )
        ranges, layers = self._memory.take(tokens), self._geometry.num_layers
        rows = (self._memory.view(part).view(self._dtype) for part in ranges)
        held = HostKv(tuple(ContiguousKv(by_token(each, self._geometry, layers)) for each in rows))
        return HeldDonor(held, tokens, partial(self._memory.give_back, ranges))


class DeviceTier(MemoryTier[PagedKv]):
    """Donor KV in an arena of `blocks` blocks, a pool of the engine's shape on `device`; nothing waits on the host."""

    def __init__(
        self,
        blocks: int,
        geometry: KvGeometry,
        dtype: torch.dtype,
        device: torch.device,
        setting: str = "SEMBLEND_DEVICE_BYTES",
    ) -> None:
        """Allocate the arena, sized by `setting`. Raises ConfigurationError when it has no block or does not fit."""
        if blocks < 1:
            raise ConfigurationError(
                f"device memory for donors of {blocks} blocks; raise {setting} to at least "
                f"{geometry.bytes_per_token(dtype) * geometry.block_size}, one block of this model, or set it to 0"
            )
        super().__init__("the device tier", device)
        shape = (blocks, geometry.num_layers, geometry.kv_factor, geometry.row_elements)
        try:
            self._arena = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{blocks} blocks of {geometry} for donors do not fit on {device}; lower {setting} or the engine's own "
                "share of the memory"
            ) from error
        self._geometry = geometry
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_tokens(self) -> int:
        """Positions that the free blocks hold."""
        with self._lock:
            return len(self._free) * self._geometry.block_size

    def _take(self, donor_id: str, tokens: int) -> HeldDonor[PagedKv]:
        needed = self._geometry.blocks_for(tokens)
        if len(self._free) < needed:
            raise CapacityError(
                f"donor {donor_id} needs {needed} blocks; {len(self._free)} of {self._arena.shape[0]} are free in "
                "the device tier, drop donors or raise SEMBLEND_DEVICE_BYTES"
            )
        blocks = [self._free.pop() for _ in range(needed)]
        kv = PagedKv(self._arena, torch.tensor(blocks, dtype=torch.int64), self._geometry)
        return HeldDonor(kv, tokens, partial(self._free.extend, blocks))


class DonorStore:
    """The host tier and the device tier, if any. Thread safe.

    A donor that moves stays readable: it is in its new tier before it leaves the old one."""

    def __init__(self, host: HostTier, device: DeviceTier | None) -> None:
        self.host, self.device = host, device

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
            with self.device.reading(donor_id) as source, self.host.writing(donor_id, tokens) as held:
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
