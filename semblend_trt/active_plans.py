"""The plans of the running iteration, by request id: written by the worker, read by the engine wrapper."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from semblend_trt.plan import EngineMode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from semblend_trt.plan import SemanticKvPlan


class ActivePlans:
    """Thread-safe plans by request id.

    A plan is *pending* from `put` until the forward that executes it calls `take`. Its publication limit outlives the
    plan: blocks written by the request stay approximate until the engine has released them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, SemanticKvPlan] = {}
        self._exact_tokens: dict[int, int] = {}

    def put(self, plan: SemanticKvPlan) -> None:
        """Notes the plan's publication limit, and makes a plan for the wrapper pending (loads are idempotent)."""
        with self._lock:
            if plan.execution.mode is EngineMode.WRAPPER:
                self._pending[plan.request_id] = plan
            if not plan.is_exact:
                self._exact_tokens[plan.request_id] = plan.exact_token_count

    def take(self, request_id: int) -> SemanticKvPlan | None:
        """Returns the pending plan and removes it: a plan is executed by one forward only."""
        with self._lock:
            return self._pending.pop(request_id, None)

    def take_all(self, request_ids: Iterable[int]) -> dict[int, SemanticKvPlan]:
        """The pending plans of these requests, removed as by `take`. In most iterations there is none to look for."""
        with self._lock:
            if not self._pending:
                return {}
            return {each: self._pending.pop(each) for each in request_ids if each in self._pending}

    def publishable_tokens(self, request_id: int) -> int | None:
        """Leading tokens whose KV equals a cold run's; None when all of the request's KV does."""
        with self._lock:
            return self._exact_tokens.get(request_id)

    def computed_whole(self, request_id: int) -> None:
        """Lifts the publication limit of a request whose plan was dropped: the forward, in which this is said, computed
        everything that the plan had placed, and so wrote over it."""
        self.released(request_id)

    def discard(self, request_id: int) -> None:
        """Drops the pending plan of a request that ends before any forward ran it."""
        with self._lock:
            self._pending.pop(request_id, None)

    def released(self, request_id: int) -> None:
        """Forgets the publication limit. Only the owner of the blocks may say so, once it has let go of them:
        forgetting earlier would publish approximate KV."""
        with self._lock:
            self._exact_tokens.pop(request_id, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)
