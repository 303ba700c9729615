"""What rank 0's tiers tell the scheduler, and what they are told beside the metadata."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semblend_trt.donors.donor_text import DonorText


class TierEvent(str, Enum):
    """What happened to a donor, or to the disk. The values are the metric's labels."""

    FILE_FOUND = "file_found"
    FILE_REFUSED = "file_refused"
    FILES_READ = "files_read"
    FILE_WRITTEN = "file_written"
    WRITE_FAILED = "write_failed"
    WRITE_SKIPPED = "write_skipped"
    FETCHED = "fetched"
    FETCH_FAILED = "fetch_failed"
    LIFTED = "lifted"
    LIFT_FAILED = "lift_failed"
    DISK_UNAVAILABLE = "disk_unavailable"


@dataclass(frozen=True, slots=True)
class TierNews:
    """One event; `donor_id` is empty where it concerns no donor, `text` that of a file that was found."""

    event: TierEvent
    donor_id: str = ""
    error: str | None = None
    text: DonorText | None = None


@dataclass(slots=True)
class DiskLink:
    """Exists while the disk tier is open. `texts` are those of donors that may get a file and have none yet, entered
    and withdrawn by the scheduler; `found` are donors whose files were there at the start."""

    texts: dict[str, DonorText] = field(default_factory=dict)
    found: deque[TierNews] = field(default_factory=deque)
