"""The six outcomes of a request, and the ledger in which every request ends in exactly one of them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Mapping

OTHER_REASON = "other"


class Outcome(str, Enum):
    """How reuse ended for one request."""

    EXACT_PREFIX_ROUTE = "exact_prefix_route"  # the engine's own exact prefix was as good as any donor
    SEMANTIC_DISCOVERY_ONLY = "semantic_discovery_only"  # donors were found and reported, none was placed on purpose
    SEMANTIC_PLACEMENT = "semantic_placement"  # the request was sent to where its donor is
    BACKEND_MATERIALIZED_REUSE = "backend_materialized_reuse"  # donor KV was placed and used
    BACKEND_DECLINED_REUSE = "backend_declined_reuse"  # reuse was refused or failed, for a reason
    COLD_FALLBACK = "cold_fallback"  # nothing to reuse


@dataclass(frozen=True, slots=True)
class Settled:
    """A request's outcome; `evidence` holds the figures that go with it."""

    outcome: Outcome
    reason: str | None
    evidence: Mapping[str, Any]


class OutcomeLedger:
    """Counts outcomes and reasons for ever, and keeps the detail of the `recent` requests settled last.

    Thread safe. Memory is bounded: a request that fell out of the recent ones is no longer known, and reasons beyond
    `max_reasons` different ones count as `other`.
    """

    def __init__(self, recent: int = 4096, max_reasons: int = 256) -> None:
        if recent < 1 or max_reasons < 1:
            raise SemBlendError(f"recent {recent} and max_reasons {max_reasons} must both be >= 1")
        self._recent, self._max_reasons = recent, max_reasons
        self._lock = threading.Lock()
        self._settled: OrderedDict[int, Settled] = OrderedDict()
        self._counts: Counter[Outcome] = Counter()
        self._reasons: Counter[str] = Counter()

    def settle(self, request_id: int, outcome: Outcome, reason: str | None = None, **evidence: Any) -> None:
        """Records the one outcome of a request.

        Raises SemBlendError when the request has one already, or when reuse was declined without a reason.
        """
        outcome = Outcome(outcome)
        if outcome is Outcome.BACKEND_DECLINED_REUSE and not reason:
            raise SemBlendError(f"request {request_id}: declined reuse needs a reason; name the check that refused it")
        settled = Settled(outcome, reason or None, MappingProxyType(evidence))
        with self._lock:
            earlier = self._settled.get(request_id)
            if earlier is not None:
                raise SemBlendError(
                    f"request {request_id} ended as {earlier.outcome.value} and cannot end as {outcome.value} too; "
                    "forget() it first if the id is in use again"
                )
            self._settled[request_id] = settled
            if len(self._settled) > self._recent:
                self._settled.popitem(last=False)
            self._counts[outcome] += 1
            if reason:
                known = reason in self._reasons or len(self._reasons) < self._max_reasons
                self._reasons[reason if known else OTHER_REASON] += 1

    def counts(self) -> dict[Outcome, int]:
        """Requests by outcome since the start; all six are present."""
        with self._lock:
            return {outcome: self._counts[outcome] for outcome in Outcome}

    def reasons(self) -> dict[str, int]:
        """Requests by reason since the start, the most frequent first."""
        with self._lock:
            return dict(self._reasons.most_common())

    def of(self, request_id: int) -> Settled | None:
        """The request's outcome; None when it is not settled, or too long ago."""
        with self._lock:
            return self._settled.get(request_id)

    def forget(self, request_id: int) -> None:
        """Drops the detail of a request, whose id may then end again; the counts stay."""
        with self._lock:
            self._settled.pop(request_id, None)
