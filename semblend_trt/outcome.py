"""How requests end: the six outcomes, the report of one request, and the ledger of all."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from semblend_trt.errors import SemBlendError
from semblend_trt.reasons import counted_as

# Requests, those that ended last, whose reports are kept.
MAX_REPORTS = 4096
# The key of an answer's usage that holds its receipt, and the same in vLLM's `kv_transfer_params`.
RECEIPT, VLLM_RECEIPT = "semblend", "semblend.receipt"
_RECEIPT = (
    *("outcome", "reason", "policy", "profile", "generation", "exact_prefix_tokens", "offered_tokens"),
    *("sampled_tokens", "checked_tokens", "reused_tokens", "recomputed_tokens", "largest_kept"),
)


class Outcome(str, Enum):
    """How reuse ended for one request."""

    EXACT_PREFIX_ROUTE = "exact_prefix_route"  # the engine's own exact prefix was as good as any donor
    SEMANTIC_DISCOVERY_ONLY = "semantic_discovery_only"  # donors were found and reported, none was placed on purpose
    SEMANTIC_PLACEMENT = "semantic_placement"  # the request was sent to where its donor is
    BACKEND_MATERIALIZED_REUSE = "backend_materialized_reuse"  # donor KV was placed and used
    BACKEND_DECLINED_REUSE = "backend_declined_reuse"  # reuse was refused or failed, for a reason
    COLD_FALLBACK = "cold_fallback"  # nothing to reuse


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A held donor whose text is near a request's; `similarity` is the cosine of their vectors."""

    donor_id: str
    similarity: float


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What became of one request's prompt tokens. `outcome` is the value of an Outcome.

    `offered_tokens` were placed from donors; each of them is either reused or recomputed. `checked_tokens` were
    compared with their donor's KV, and `sampled_tokens` before them; `largest_kept` is the largest deviation among
    those that are reused, 0.0 without one. `computed_holes` are tokens promised to the engine that the wrapper
    computed, recomputed ones among them. `exact_prefix_tokens` are the engine's own. `generation` is the highest of the
    donors that were placed from. `policy` is the engine's, and `profile` the SHA-256 of the reuse profile that held for
    the request, in hex.

    While a check's result is not known (it has not run yet, or ran on a rank that does not report) `checked_tokens`,
    `sampled_tokens`, `recomputed_tokens` and `largest_kept` are None, and only what needs no check counts as reused.

    `nearest` are the held donors whose texts are most like the request's, as far as they are known by now. They are
    found beside serving and have no part in what was reused.
    """

    outcome: str
    reason: str | None
    reused_tokens: int = 0
    computed_holes: int = 0
    offered_tokens: int = 0
    checked_tokens: int | None = 0
    recomputed_tokens: int | None = 0
    largest_kept: float | None = 0.0
    exact_prefix_tokens: int = 0
    sampled_tokens: int | None = 0
    generation: int = 0
    policy: str | None = None
    profile: str | None = None
    nearest: tuple[Neighbour, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """Everything but outcome, reason and neighbours, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)[2:-1]}

    @property
    def receipt(self) -> dict[str, Any]:
        """What an answer's usage says under RECEIPT, in JSON's values; docs/receipts.md describes it."""
        largest = self.largest_kept
        is_number = largest is not None and math.isfinite(largest)  # JSON has no infinities
        return {name: getattr(self, name) for name in _RECEIPT} | {"largest_kept": largest if is_number else None}


class OutcomeLedger:
    """Counts outcomes and reasons for ever, and keeps the reports of the last MAX_REPORTS requests. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: OrderedDict[int, ReuseReport] = OrderedDict()
        self._counts: Counter[Outcome] = Counter()
        self._reasons: Counter[str] = Counter()

    def record(self, request_id: int, report: ReuseReport) -> None:
        """Records how a request has ended.

        Raises SemBlendError when that is recorded already, or when reuse was declined without a reason.
        """
        outcome, reason = Outcome(report.outcome), report.reason
        if outcome is Outcome.BACKEND_DECLINED_REUSE and not reason:
            raise SemBlendError(f"request {request_id}: declined reuse needs a reason; name the check that refused it")
        with self._lock:
            if (earlier := self._reports.get(request_id)) is not None:
                raise SemBlendError(
                    f"request {request_id} ended as {earlier.outcome} and cannot end as {outcome.value} too; "
                    "forget() it first if the id is in use again"
                )
            self._reports[request_id] = report
            if len(self._reports) > MAX_REPORTS:
                self._reports.popitem(last=False)
            self._counts[outcome] += 1
            if reason:
                self._reasons[counted_as(reason)] += 1

    def counts(self) -> dict[Outcome, int]:
        """Requests by outcome since the start; all six are present."""
        with self._lock:
            return {outcome: self._counts[outcome] for outcome in Outcome}

    def reasons(self) -> dict[str, int]:
        """Requests by reason since the start, the most frequent first."""
        with self._lock:
            return dict(self._reasons.most_common())

    def of(self, request_id: int) -> ReuseReport | None:
        """The request's report; None when it has not ended, or too long ago."""
        with self._lock:
            return self._reports.get(request_id)

    def forget(self, request_id: int) -> None:
        """Drops the report of a request, whose id may then end again; the counts stay."""
        with self._lock:
            self._reports.pop(request_id, None)
