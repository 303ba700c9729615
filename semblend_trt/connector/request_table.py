"""What the scheduler remembers of each running request, by request id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from semblend_trt.connector.metadata import SaveIntent
    from semblend_trt.donors.catalog import Lease
    from semblend_trt.evidence import CheckEvidence
    from semblend_trt.plan import SemanticKvPlan

# One engine runs at most a few thousand sequences; anything older was lost by an error path that never reports.
MAX_TRACKED_REQUESTS = 4096


@dataclass(slots=True)
class TrackedRequest:
    """One request between its lookup and its end.

    `reason` says why no KV was placed; `is_followed`, that the workers were told of it and can save it. `evidence` is
    what the check of its plan found, None until the engine says.
    """

    request_id: int
    namespace_key: str
    prompt: npt.NDArray[np.int32]
    num_computed_tokens: int
    plan: SemanticKvPlan | None = None
    reason: str | None = None
    runs_found: int = 0
    leases: list[Lease] = field(default_factory=list)
    intent: SaveIntent | None = None
    is_followed: bool = False
    load_failed: bool = False
    evidence: CheckEvidence | None = None
    written_tokens: int = 0

    @property
    def matched_tokens(self) -> int:
        return self.plan.matched_tokens if self.plan is not None else 0

    def release_leases(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases.clear()


class RequestTable:
    """Insertion-ordered and bounded: `add` returns the requests that had to make room."""

    def __init__(self, limit: int = MAX_TRACKED_REQUESTS) -> None:
        self._limit = limit
        self._requests: OrderedDict[int, TrackedRequest] = OrderedDict()

    def add(self, request: TrackedRequest) -> list[TrackedRequest]:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id)
        expired = []
        while len(self._requests) > self._limit:
            expired.append(self.pop_oldest())
        return expired

    def get(self, request_id: int) -> TrackedRequest | None:
        return self._requests.get(request_id)

    def pop(self, request_id: int) -> TrackedRequest | None:
        return self._requests.pop(request_id, None)

    def pop_oldest(self) -> TrackedRequest:
        """Removes and returns the request tracked longest; KeyError when there is none."""
        return self._requests.popitem(last=False)[1]

    def __len__(self) -> int:
        return len(self._requests)
