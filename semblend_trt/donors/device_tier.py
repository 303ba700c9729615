"""The device tier: donors in an arena that is allocated once, a paged pool of the engine pool's shape and dtype.

A donor is a list of blocks, so nothing fragments. Its blocks are free once it is dropped and no thread queues work on
them. Queued work may still run then, so the blocks' next writer waits for it on the device."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kernels.device import Event, current_stream, record, wait
from kernels.layout import KvGeometry, PagedKv
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class _Donor:
    """`block_ids`: int64 [blocks], on the host. `readers` threads queue work; `reads` are the ends of earlier work."""

    block_ids: torch.Tensor
    tokens: int
    written: Event | None = None
    is_ready: bool = False
    is_dropped: bool = False
    readers: int = 0
    reads: list[Event] = field(default_factory=list)


class DeviceTier:
    """Donor KV in `blocks` blocks of `geometry` on `device`, which may be the CPU. Thread safe.

    Reads and writes queue their work on the current stream of their `with` block; nothing waits on the host."""

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
        shape = (blocks, geometry.num_layers, geometry.kv_factor, geometry.row_elements)
        try:
            self._arena = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{blocks} blocks of {geometry} for donors do not fit on {device}; lower {setting} or the engine's own "
                "share of the memory"
            ) from error
        self._geometry = geometry
        self._donors: dict[str, _Donor] = {}
        self._free = list(range(blocks - 1, -1, -1))
        self._fences: list[Event] = []
        self._lock = threading.RLock()

    @property
    def free_tokens(self) -> int:
        """Positions that the free blocks hold."""
        with self._lock:
            return len(self._free) * self._geometry.block_size

    @contextmanager
    def writing(self, donor_id: str, tokens: int) -> Iterator[PagedKv]:
        """Give blocks for `tokens` positions of a new donor, which is held, and readable, once the block is left.

        Raises ValueError when the id is taken, and CapacityError when free blocks are too few. Raises
        DonorUnavailableError at the end when the donor was dropped meanwhile. After an error nothing is held."""
        needed = self._geometry.blocks_for(tokens)
        with self._lock:
            if donor_id in self._donors:
                raise ValueError(f"donor {donor_id} is already in the device tier; drop it first")
            if len(self._free) < needed:
                raise CapacityError(
                    f"donor {donor_id} needs {needed} blocks; {len(self._free)} of {self._arena.shape[0]} are free in "
                    "the device tier, drop donors or raise SEMBLEND_DEVICE_BYTES"
                )
            self._fences = fences = [fence for fence in self._fences if not fence.query()]
            taken = torch.tensor([self._free.pop() for _ in range(needed)], dtype=torch.int64)
            donor = self._donors[donor_id] = _Donor(taken, tokens, readers=1)
        stream = current_stream(self._arena.device)
        try:
            wait(stream, fences)
            yield PagedKv(self._arena, donor.block_ids, self._geometry)
        except BaseException:
            self._let_go(donor_id, donor)
            raise
        finally:
            self._end_work(donor, record(stream))
        with self._lock:
            if donor.is_dropped:
                raise DonorUnavailableError(f"donor {donor_id} was dropped while it was being saved")
            donor.is_ready = True

    @contextmanager
    def reading(self, donor_id: str) -> Iterator[PagedKv]:
        """Give the donor's blocks, which stay its own until everything queued within the block has run.

        Raises DonorUnavailableError when the donor is not held."""
        with self._lock:
            donor = self._ready(donor_id)
            donor.readers += 1
        stream = current_stream(self._arena.device)
        try:
            wait(stream, [donor.written])
            yield PagedKv(self._arena, donor.block_ids, self._geometry)
        finally:
            self._end_work(donor, record(stream))

    def tokens_of(self, donor_id: str) -> int:
        """Return the positions that the donor holds; DonorUnavailableError when it is not held."""
        with self._lock:
            return self._ready(donor_id).tokens

    def drop(self, donor_id: str) -> bool:
        """Free the donor's blocks, now or when its last reader leaves; False without one."""
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

    def _ready(self, donor_id: str) -> _Donor:
        donor = self._donors.get(donor_id)
        if donor is None or not donor.is_ready:
            raise DonorUnavailableError(f"donor {donor_id} is not in the device tier")
        return donor

    def _end_work(self, donor: _Donor, end: Event | None) -> None:
        """End a reader or writer of `donor` whose queued work ends with `end`."""
        with self._lock:
            donor.readers -= 1
            if end is not None:
                if donor.is_ready:
                    donor.reads = [*(read for read in donor.reads if not read.query()), end]
                else:
                    donor.written = end
            self._release_unread(donor)

    def _let_go(self, donor_id: str, donor: _Donor) -> bool:
        """Drop `donor`, not another one of the same name; False when it was dropped before."""
        with self._lock:
            if self._donors.get(donor_id) is not donor:
                return False
            del self._donors[donor_id]
            donor.is_dropped = True
            self._release_unread(donor)
            return True

    def _release_unread(self, donor: _Donor) -> None:
        if not donor.is_dropped or donor.readers:
            return
        self._free += donor.block_ids.tolist()
        self._fences += donor.reads
        if donor.written is not None:
            self._fences.append(donor.written)
