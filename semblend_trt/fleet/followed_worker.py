"""FollowedWorker: what a directory keeps of one worker and its donors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semblend_trt.fleet.known_namespaces import KnownNamespace
    from semblend_trt.fleet.sketch_index import Posting

# The seconds between two heartbeats until a worker says what they are.
FIRST_INTERVAL = 20.0


@dataclass(slots=True, eq=False)
class FollowedDonor:
    """A donor: its tier, and where its namespace and its sketch are kept; None of either that could not be kept."""

    tier: str
    namespace: KnownNamespace | None = None
    posting: Posting | None = None


@dataclass(slots=True, eq=False)
class FollowedWorker:
    """A worker: its number in the index, when it was believed last, and its donors with their `state_digest`.

    `is_partial` when donors were left out for want of room: heartbeats are compared again when there is some.
    `is_unplaced` when donors could not be placed for want of a namespace. `unheeded` heartbeats came in its name and
    were not believed since one event was.
    """

    number: int
    seen_at: float
    interval: float = FIRST_INTERVAL
    donors: dict[str, FollowedDonor] = field(default_factory=dict)
    digest: int = 0
    asked_at: float = float("-inf")
    wants_resync: bool = False
    is_partial: bool = False
    is_unplaced: bool = False
    unheeded: int = 0
