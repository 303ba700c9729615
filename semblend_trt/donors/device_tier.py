"""The device tier: donors in an arena that is allocated once, a paged pool of the engine pool's shape and dtype.

A donor is a list of blocks, so nothing fragments."""

from __future__ import annotations

from functools import partial

import torch

from kernels.layout import KvGeometry, PagedKv
from semblend_trt.donors.store import HeldDonor, MemoryTier
from semblend_trt.errors import CapacityError, ConfigurationError


class DeviceTier(MemoryTier[PagedKv]):
    """Donor KV in `blocks` blocks of `geometry` on `device`, which may be the CPU; nothing waits on the host."""

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
