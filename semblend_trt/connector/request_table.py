"""What the scheduler remembers of each running request, by request id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from semblend_trt.connector.metadata import SaveIntent
    from semblend_trt.donors.catalog import Lease
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan

# One engine runs at most a few thousand sequences; anything older was lost by an error path that never reports.
MAX_TRACKED_REQUESTS = 4096
# Running requests are scheduled almost every iteration; one that was cancelled may never be heard of again (1.2 and
# later). A request that is given up too early is not kept as a donor, and nothing else.
MAX_SILENT_ITERATIONS = 32


@dataclass(slots=True)
class TrackedRequest:
    """One request between its lookup and its end.

    `reason` says why no KV was placed; `is_followed`, that the workers were told of it, and can save it from
    `block_ids`. `evidence` is what the check of its plan found, None until the engine says. `is_scheduled`: it has been
    in an iteration; until then what it was promised is still to be loaded. `forward_failed`: the forward of its last
    iteration did.
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
    is_scheduled: bool = False
    load_failed: bool = False
    forward_failed: bool = False
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

    @property
    def awaits_load(self) -> bool:
        """True while the engine counts on tokens that nobody has loaded: it must not be given up."""
        return self.matched_tokens > 0 and not self.is_scheduled

    def release_leases(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases.clear()


class RequestTable:
    """Requests in the order of their last word, and bounded but for those that await a load: `add` returns those that
    had to make room."""

    def __init__(self, limit: int = MAX_TRACKED_REQUESTS) -> None:
        self._limit = limit
        self._requests: OrderedDict[int, TrackedRequest] = OrderedDict()
        self._iteration = 0
        self._loading: list[TrackedRequest] = []
        self._holder_of_block: dict[int, TrackedRequest] = {}

    def add(self, request: TrackedRequest) -> list[TrackedRequest]:
        request.last_heard = self._iteration
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id)
        surplus = max(0, len(self._requests) - self._limit)
        return self._give_up(islice((each for each in self._requests.values() if not each.awaits_load), surplus))

    def begin_iteration(self, *, last_failed: bool = False) -> list[TrackedRequest]:
        """Releases what the loads of the iteration before read; returns, and forgets, requests silent for too long.

        Those loads were ordered before the forward that has been issued since. If that forward failed, the requests in
        it have ended, whatever the engine says of them.
        """
        ended = self._give_up(filter(self.is_running, self._requests.values())) if last_failed else []
        for request in ended:
            request.forward_failed = True
        self._iteration += 1
        for request in self._loading:
            request.release_leases()
        self._loading.clear()
        limit = self._iteration - MAX_SILENT_ITERATIONS
        silent = takewhile(lambda each: each.last_heard < limit, self._requests.values())
        return ended + self._give_up(each for each in silent if not each.awaits_load)

    def scheduled(self, request_id: int, *, loads: bool = False) -> TrackedRequest | None:
        """The request with this id, which runs in the iteration; with `loads` its donors are read in it."""
        request = self._requests.get(request_id)
        if request is not None:
            request.last_heard = self._iteration
            request.is_scheduled = True
            self._requests.move_to_end(request.request_id)
            if loads:
                self._loading.append(request)
        return request

    def holds(self, request: TrackedRequest, block_ids: Iterable[int]) -> None:
        """The engine says that the request has these blocks, its own or shared ones."""
        self._holder_of_block.update(dict.fromkeys(block_ids, request))

    def displaced(self, block_ids: Iterable[int], by: TrackedRequest) -> list[TrackedRequest]:
        """Returns, and forgets, requests that had one of these blocks, which are `by`'s own now: they have ended."""
        holders = {id(each): each for each in map(self._holder_of_block.get, block_ids) if each is not None}
        return self._give_up(
            each for each in holders.values() if each is not by and self._requests.get(each.request_id) is each
        )

    def is_running(self, request: TrackedRequest) -> bool:
        """Whether the request is part of the iteration that was begun last."""
        return request.is_scheduled and request.last_heard == self._iteration

    def get(self, request_id: int) -> TrackedRequest | None:
        return self._requests.get(request_id)

    def pop(self, request_id: int) -> TrackedRequest | None:
        return self._requests.pop(request_id, None)

    def pop_oldest(self) -> TrackedRequest:
        """Removes and returns the request not heard of for longest; KeyError when there is none."""
        return self._requests.popitem(last=False)[1]

    def _give_up(self, requests: Iterable[TrackedRequest]) -> list[TrackedRequest]:
        given_up = list(requests)
        for request in given_up:
            del self._requests[request.request_id]
        return given_up

    def __len__(self) -> int:
        return len(self._requests)
