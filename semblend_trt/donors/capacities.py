"""Capacities: how much each tier may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from semblend_trt.donors.file_size import FileSize
from semblend_trt.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Capacities:
    """`host_bytes` bounds the KV bytes of one rank on the host; `bytes_per_token` is K and V of all its layers.

    The arena on the card has `device_blocks` blocks of `block_size` tokens. `disk_bytes` bounds the files, of which
    `file_size` says how large one becomes. Raises ConfigurationError.
    """

    host_bytes: int
    bytes_per_token: int
    max_donors: int
    device_blocks: int = 0
    block_size: int = 1
    disk_bytes: int = 0
    file_size: FileSize = field(default_factory=lambda: FileSize(0, 0))

    def __post_init__(self) -> None:
        at_least_0 = (self.host_bytes, self.device_blocks, self.disk_bytes)
        if min(at_least_0) < 0 or min(self.bytes_per_token, self.max_donors, self.block_size) < 1:
            raise ConfigurationError(
                f"donor catalog with host_bytes {self.host_bytes}, bytes_per_token {self.bytes_per_token}, max_donors "
                f"{self.max_donors}, device_blocks {self.device_blocks}, block_size {self.block_size} and disk_bytes "
                f"{self.disk_bytes}; the bytes and device_blocks must be >= 0, the others >= 1"
            )

    @property
    def host_tokens(self) -> int:
        return self.host_bytes // self.bytes_per_token
