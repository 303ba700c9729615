"""What the scheduler remembers of each running request, by request id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from semblend_trt.connector.metadata import SaveIntent
    from semblend_trt.donors.catalog import Lease
    from semblend_trt.evidence import CheckEvidence
    from semblend_trt.plan import SemanticKvPlan

# One engine runs at most a few thousand sequences; anything older was lost by an error path that never reports.
MAX_TRACKED_REQUESTS = 4096
# Running requests are scheduled almost every iteration; one that fails may never be heard of again (1.1 and 1.2).
MAX_SILENT_ITERATIONS = 1024


@dataclass(slots=True)
class TrackedRequest:
    """One request between its lookup and its end.

    `reason` says why no KV was placed; `is_followed`, that the workers were told of it, and can save it from
    `block_ids`. `evidence` is what the check of its plan found, None until the engine says.
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
    block_ids: list[int] = field(default_factory=list)
    evidence: CheckEvidence | None = None
    written_tokens: int = 0
    last_heard: int = 0

    @classmethod
    def refused(cls, request_id: int, num_computed_tokens: int, reason: str) -> TrackedRequest:
        """One that takes no part."""
        return cls(request_id, "", np.empty(0, dtype=np.int32), num_computed_tokens, reason=reason)

    @property
    def matched_tokens(self) -> int:
        return self.plan.matched_tokens if self.plan is not None else 0

    def release_leases(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases.clear()


class RequestTable:
    """Requests in the order of their last word, and bounded: `add` returns those that had to make room."""

    def __init__(self, limit: int = MAX_TRACKED_REQUESTS) -> None:
        self._limit = limit
        self._requests: OrderedDict[int, TrackedRequest] = OrderedDict()
        self._iteration = 0
        self._loading: list[TrackedRequest] = []

    def add(self, request: TrackedRequest) -> list[TrackedRequest]:
        request.last_heard = self._iteration
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id)
        expired = []
        while len(self._requests) > self._limit:
            expired.append(self.pop_oldest())
        return expired

    def begin_iteration(self) -> list[TrackedRequest]:
        """Releases what the loads of the iteration before read; returns, and forgets, requests silent for too long.

        Those loads were ordered before the forward that has been issued since.
        """
        self._iteration += 1
        for request in self._loading:
            request.release_leases()
        self._loading.clear()
        silent = []
        while self._requests and self._oldest.last_heard < self._iteration - MAX_SILENT_ITERATIONS:
            silent.append(self.pop_oldest())
        return silent

    def scheduled(self, request_id: int, *, loads: bool = False) -> TrackedRequest | None:
        """The request with this id, which runs in the iteration; with `loads` its donors are read in it."""
        request = self._requests.get(request_id)
        if request is not None:
            request.last_heard = self._iteration
            self._requests.move_to_end(request.request_id)
            if loads:
                self._loading.append(request)
        return request

    def get(self, request_id: int) -> TrackedRequest | None:
        return self._requests.get(request_id)

    def pop(self, request_id: int) -> TrackedRequest | None:
        return self._requests.pop(request_id, None)

    def pop_oldest(self) -> TrackedRequest:
        """Removes and returns the request not heard of for longest; KeyError when there is none."""
        return self._requests.popitem(last=False)[1]

    @property
    def _oldest(self) -> TrackedRequest:
        return next(iter(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)
