"""Where donors' KV lies. HostTier owns host memory: what is saved is copied and stays until it is dropped."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from kernels.layout import SUPPORTED_DTYPES, ContiguousKv
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError


@dataclass(slots=True)
class _Slot:
    """One donor's room; `kv` is None while its bytes are still being copied."""

    size: int
    kv: ContiguousKv | None = None


class HostTier:
    """Donor KV in host memory, at most `byte_budget` bytes of it. Thread safe; copies run outside the lock.

    With `pin` the memory is page-locked, so that a GPU can read it asynchronously; torch may round each page-locked
    allocation up, which `used_bytes` does not count.
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
        """Bytes of all donors held or being copied."""
        with self._lock:
            return self._used_bytes

    @property
    def byte_budget(self) -> int:
        return self._byte_budget

    def save(self, donor_id: str, tensor: torch.Tensor) -> None:
        """Copies `tensor` ([layers, 2, kv_heads, tokens, head_dim], any device and strides); done when it returns.

        Raises ValueError for another shape or dtype or an id that is taken, CapacityError when the budget has no room
        for it, DonorUnavailableError when the donor was dropped meanwhile. Nothing is held after an error.
        """
        _check_donor_tensor(donor_id, tensor)
        slot = self._claim(donor_id, tensor.numel() * tensor.element_size())
        try:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pin)
            # Blocking, so that the bytes are there, and the source may be rewritten, once this returns.
            held.copy_(tensor)
        except BaseException:
            self._release(donor_id, slot)
            raise
        with self._lock:
            if self._slots.get(donor_id) is not slot:
                raise DonorUnavailableError(f"donor {donor_id} was dropped while it was being saved")
            slot.kv = ContiguousKv(held)

    def get(self, donor_id: str) -> ContiguousKv:
        """Returns the donor's KV, valid as long as the caller keeps it; DonorUnavailableError when it is not held."""
        with self._lock:
            slot = self._slots.get(donor_id)
            if slot is None or slot.kv is None:
                raise DonorUnavailableError(f"donor {donor_id} is not in host memory")
            return slot.kv

    def drop(self, donor_id: str) -> bool:
        """Frees the donor, or stops a save of it; False when there is none."""
        with self._lock:
            slot = self._slots.pop(donor_id, None)
            if slot is None:
                return False
            self._used_bytes -= slot.size
            return True

    def clear(self) -> None:
        """Frees every donor."""
        with self._lock:
            self._slots.clear()
            self._used_bytes = 0

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

    def _release(self, donor_id: str, slot: _Slot) -> None:
        with self._lock:
            if self._slots.get(donor_id) is slot:
                del self._slots[donor_id]
                self._used_bytes -= slot.size


def _check_donor_tensor(donor_id: str, tensor: torch.Tensor) -> None:
    if tensor.ndim != 5 or tensor.shape[1] != 2 or not tensor.numel():
        raise ValueError(
            f"KV of donor {donor_id} has shape {list(tensor.shape)}; [layers, 2, kv_heads, tokens, head_dim] is needed"
        )
    if tensor.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"KV of donor {donor_id} is {tensor.dtype}; supported are float32, bfloat16 and float16")
