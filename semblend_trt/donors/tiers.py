"""The host tier: donors' KV in host memory that we own. What is saved is copied and stays until it is dropped."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.layout import SUPPORTED_DTYPES, ContiguousKv
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class _Slot:
    """One donor's room; `kv` is None while its bytes are still being copied."""

    size: int
    kv: ContiguousKv | None = None


class HostTier:
    """Donor KV in host memory, at most `byte_budget` bytes of it. Thread safe; copies run outside the lock.

    In memory a donor is [layers, tokens, kv_factor, kv_heads, head_dim]: any run of tokens of one layer is then one
    copy to a device. With `pin` the memory is page-locked, so that a GPU can read it asynchronously; torch may round
    each page-locked allocation up, which `used_bytes` does not count, and gives it to another donor only when the
    copies queued from it have run.
    """

    def __init__(self, byte_budget: int, pin: bool) -> None:
        if byte_budget < 0:
            raise ConfigurationError(f"host tier with a budget of {byte_budget} bytes; it must be >= 0")
        if pin and not torch.cuda.is_available():
            raise ConfigurationError("host tier cannot pin memory without CUDA; use pin=False")
        self._byte_budget = byte_budget
        self._pin = pin
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all donors held or being copied, a dropped one's until its copy has ended."""
        with self._lock:
            return self._used_bytes

    @property
    def byte_budget(self) -> int:
        return self._byte_budget

    def save(self, donor_id: str, tensor: torch.Tensor) -> None:
        """Copies `tensor` ([layers, 2, kv_heads, tokens, head_dim], any device and strides); done when it returns.

        Raises as `writing` does. Nothing is held after an error.
        """
        with self.writing(donor_id, tensor.shape, tensor.dtype) as held:
            # Blocking, so that the bytes are there, and the source may be rewritten, once this returns.
            held.copy_(tensor)

    @contextmanager
    def writing(self, donor_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Memory of `shape` ([layers, 2, kv_heads, tokens, head_dim]) for a new donor, held once the block is left.

        Its bytes must be there by then. Raises ValueError for another shape or dtype or an id that is taken,
        CapacityError when the budget has no room for it, DonorUnavailableError at the end when the donor was dropped
        meanwhile. Nothing is held after an error.
        """
        _check_donor(donor_id, shape, dtype)
        slot = self._claim(donor_id, torch.Size(shape).numel() * dtype.itemsize)
        try:
            layers, kv_factor, kv_heads, tokens, head_dim = shape
            in_memory = (layers, tokens, kv_factor, kv_heads, head_dim)
            held = torch.empty(in_memory, dtype=dtype, device="cpu", pin_memory=self._pin).permute(0, 2, 3, 1, 4)
            yield held
        except BaseException:
            self._end_copy(donor_id, slot, None)
            raise
        if not self._end_copy(donor_id, slot, ContiguousKv(held)):
            raise DonorUnavailableError(f"donor {donor_id} was dropped while it was being saved")

    def get(self, donor_id: str) -> ContiguousKv:
        """Returns the donor's KV, valid as long as the caller keeps it; DonorUnavailableError when it is not held."""
        with self._lock:
            slot = self._slots.get(donor_id)
            if slot is None or slot.kv is None:
                raise DonorUnavailableError(f"donor {donor_id} is not in host memory")
            return slot.kv

    def drop(self, donor_id: str) -> bool:
        """Frees the donor, or stops a save of it, whose room is free when its copy has ended; False without one."""
        with self._lock:
            slot = self._slots.pop(donor_id, None)
            if slot is None:
                return False
            if slot.kv is not None:
                self._used_bytes -= slot.size
            return True

    def clear(self) -> None:
        """Frees every donor."""
        with self._lock:
            self._used_bytes -= sum(slot.size for slot in self._slots.values() if slot.kv is not None)
            self._slots.clear()

    def __len__(self) -> int:
        with self._lock:
            return sum(slot.kv is not None for slot in self._slots.values())

    def __contains__(self, donor_id: object) -> bool:
        with self._lock:
            slot = self._slots.get(donor_id) if isinstance(donor_id, str) else None
            return slot is not None and slot.kv is not None

    def _claim(self, donor_id: str, size: int) -> _Slot:
        with self._lock:
            if donor_id in self._slots:
                raise ValueError(f"donor {donor_id} is already in host memory; drop it first")
            if self._used_bytes + size > self._byte_budget:
                raise CapacityError(
                    f"donor {donor_id} needs {size} bytes; {self._byte_budget - self._used_bytes} of "
                    f"{self._byte_budget} are free in host memory, drop donors or raise SEMBLEND_HOST_BYTES"
                )
            slot = self._slots[donor_id] = _Slot(size)
            self._used_bytes += size
            return slot

    def _end_copy(self, donor_id: str, slot: _Slot, kv: ContiguousKv | None) -> bool:
        """Makes the copied donor readable. False, and its room is free, without `kv` or when it was dropped."""
        with self._lock:
            is_ours = self._slots.get(donor_id) is slot
            if is_ours and kv is not None:
                slot.kv = kv
                return True
            if is_ours:
                del self._slots[donor_id]
            self._used_bytes -= slot.size
            return False


def _check_donor(donor_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
        raise ValueError(
            f"KV of donor {donor_id} has shape {list(shape)}; [layers, 2, kv_heads, tokens, head_dim] is needed"
        )
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"KV of donor {donor_id} is {dtype}; supported are float32, bfloat16 and float16")
