"""Capacities: how much each tier may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from semblend_trt.donors.file_size import FileSize


@dataclass(frozen=True, slots=True)
class Capacities:
    """`host_bytes` bounds the KV bytes of one rank on the host; `bytes_per_token` is K and V of all its layers.

    The arena on the card has `device_blocks` blocks of `block_size` tokens. `disk_bytes` bounds the files, of which
    `file_size` says how large one becomes.
    """

    host_bytes: int
    bytes_per_token: int
    max_donors: int
    device_blocks: int = 0
    block_size: int = 1
    disk_bytes: int = 0
    file_size: FileSize = field(default_factory=lambda: FileSize(0, 0))

    @property
    def host_tokens(self) -> int:
        return self.host_bytes // self.bytes_per_token
