"""Entry: one donor as the catalog knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.donors.placement import Tier

if TYPE_CHECKING:
    from semblend_trt.donors.eviction import DonorHistory


class DonorState(str, Enum):
    """SAVING: room is reserved, nobody may read. READY: its KV is held. FETCHING: it is being read from disk."""

    SAVING = "saving"
    READY = "ready"
    FETCHING = "fetching"


class FileState(str, Enum):
    """The donor's file: there is none, its room is reserved and it is being written, or it is there."""

    NONE = "none"
    WRITING = "writing"
    HELD = "held"


@dataclass(slots=True)
class Entry:
    """`tokens` is what the donor takes in `tier`; while it is lifted it takes room on the device as well."""

    namespace_key: str
    tier: Tier
    history: DonorHistory
    state: DonorState = DonorState.SAVING
    file: FileState = FileState.NONE
    leases: int = 0
    is_lifting: bool = False

    @property
    def tokens(self) -> int:
        return self.history.tokens

    @property
    def is_readable(self) -> bool:
        """True when its KV is in memory."""
        return self.state is DonorState.READY and self.tier is not Tier.DISK

    @property
    def is_resting(self) -> bool:
        """True when it is known, but its KV would first have to be read from disk."""
        return self.tier is Tier.DISK or self.state is DonorState.FETCHING

    @property
    def is_movable(self) -> bool:
        """True when nobody reads it and nothing is on its way; a donor that is being written is read for that."""
        is_still = self.state is DonorState.READY and self.file is not FileState.WRITING and not self.is_lifting
        return is_still and not self.leases


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts at one moment. `used_bytes` (of `byte_budget`, host), `device_blocks_used` (of `device_blocks`) and
    `disk_bytes_used` (of `disk_bytes`) include what is reserved; `ready` donors are in memory, `resting` on disk alone.
    `evicted`, `demoted`, `released`, `lifted` and `fetched` count since the start."""

    ready: int
    saving: int
    leases: int
    used_bytes: int
    byte_budget: int
    evicted: int
    demoted: int = 0
    device_blocks_used: int = 0
    device_blocks: int = 0
    resting: int = 0
    disk_bytes_used: int = 0
    disk_bytes: int = 0
    released: int = 0
    lifted: int = 0
    fetched: int = 0
