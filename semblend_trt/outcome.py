"""How requests end: outcomes, reports and the ledger of the last ones."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from semblend_trt.errors import SemBlendError

MAX_REPORTS = 4096
# The key of an answer's usage that holds its receipt, and the same in vLLM's `kv_transfer_params`.
RECEIPT, VLLM_RECEIPT = "semblend", "semblend.receipt"
# What becomes of prompt tokens: fields of a report, less "_tokens".
TOKEN_KINDS = ("offered", "sampled", "checked", "reused", "recomputed", "exact_prefix")


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
    """What became of one request's prompt tokens; `outcome` is the value of an Outcome. A receipt has all but the last
    two fields, in their order.

    Each offered token is reused or recomputed. The check compared `checked_tokens` with their donor's KV, and
    `sampled_tokens` before them, which estimate a mean of `sampled_deviation`. `largest_kept` is the largest deviation
    among those reused. `computed_holes` are tokens promised to the engine that the wrapper computed, recomputed ones
    among them. `generation` is the highest of the donors used. `profile` is the SHA-256 of the reuse profile, in hex,
    and `namespace` the key of the request's namespace; `max_kl` (nats) and `risk` are of the profile's bound, None
    without one. While a check's result is not known, what it decides has no value (None), and only what needs no check
    counts as reused."""

    outcome: str
    reason: str | None
    policy: str | None = None
    profile: str | None = None
    namespace: str | None = None
    max_kl: float | None = None
    risk: float | None = None
    generation: int = 0
    exact_prefix_tokens: int = 0
    offered_tokens: int = 0
    sampled_tokens: int | None = 0
    sampled_deviation: float | None = 0.0
    checked_tokens: int | None = 0
    reused_tokens: int = 0
    recomputed_tokens: int | None = 0
    largest_kept: float | None = 0.0
    computed_holes: int = 0
    nearest: tuple[Neighbour, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """Return everything but outcome, reason and neighbours, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)[2:-1]}

    @property
    def receipt(self) -> dict[str, Any]:
        """Return what an answer's usage says under RECEIPT, in JSON's values; docs/receipts.md describes it."""
        found = {each.name: getattr(self, each.name) for each in fields(self)[:-2]}
        # JSON has no infinities.
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in found.items()}


class OutcomeLedger:
    """Keeps the reports of the last MAX_REPORTS requests. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: OrderedDict[int, ReuseReport] = OrderedDict()

    def record(self, request_id: int, report: ReuseReport) -> None:
        """Record how a request has ended. Raises SemBlendError for a second end, or a decline without a reason."""
        outcome = Outcome(report.outcome)
        if outcome is Outcome.BACKEND_DECLINED_REUSE and not report.reason:
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

    def of(self, request_id: int) -> ReuseReport | None:
        """Return the request's report; None when it has not ended, or too long ago."""
        with self._lock:
            return self._reports.get(request_id)

    def forget(self, request_id: int) -> None:
        """Drop the report of a request, whose id may then end again."""
        with self._lock:
            self._reports.pop(request_id, None)
