"""The audit log: what was looked up, planned, moved and kept, as JSON lines. Serving never fails by it.
Line: {"schema": 1, "time": seconds since 1970 in UTC, "rank": int, "event": str, ...fields}, keys sorted."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from dataclasses import asdict
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.background import Background

if TYPE_CHECKING:
    from kernels.layout import KvGeometry
    from semblend_trt.donors.offload import SavedDonor
    from semblend_trt.namespace import CacheNamespace
    from semblend_trt.outcome import Neighbour, ReuseReport
    from semblend_trt.plan import SemanticKvPlan

logger = logging.getLogger(__name__)

SCHEMA = 1
DROP_REASONS = ("slow_disk", "not_written", "not_json", "closed")
_CLOSE_SECONDS = 5.0


class AuditLog:
    """Write events of rank 0 in order, on a thread of its own, with the fields that operators of the SemBlend package
    know.

    All lines that wait go out in one append: engines that share a file on a local file system never mix within a line.
    `max_waiting_bytes` bound what waits for a slow disk. `dropped` counts the lost events by DROP_REASONS."""

    def __init__(self, path: str | Path, max_waiting_bytes: int = 8 * 2**20) -> None:
        self.dropped: Counter[str] = Counter(dict.fromkeys(DROP_REASONS, 0))
        self._file = _AppendFile(Path(path), max_waiting_bytes, self.dropped)
        weakref.finalize(self, self._file.close)

    def event(self, name: str, /, **fields: Any) -> None:
        """Record an event; fields may hold JSON values, numpy scalars and arrays."""
        heading = {"schema": SCHEMA, "time": round(time.time(), 6), "rank": 0, "event": name}
        line: bytes | None = None
        try:
            text = json.dumps(fields | heading, sort_keys=True, separators=(",", ":"), default=methodcaller("tolist"))
            # Python writes NaN and infinities, which are not JSON; they become null.
            if "NaN" in text or "Infinity" in text:
                plain = json.loads(text, parse_constant=lambda _: None)
                text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
            line = text.encode("ascii") + b"\n"
        except (AttributeError, TypeError, ValueError, RecursionError):
            pass  # it is counted as not_json
        self._file.add(line)

    def flush(self) -> None:
        """Wait until everything recorded so far has been handed to the operating system, or was lost."""
        self._file.flush()

    def close(self) -> None:
        """Write what waits, for some seconds at most, and close the file; drop later events. May be called twice."""
        self._file.close()

    def profile(self, match: Any, namespace: CacheNamespace, geometry: KvGeometry) -> None:
        """Log a ProfileMatch (connector/lookup.py): a calibration elsewhere learns the engine's identity from it."""
        policy, refusal = (None, match.refusal) if match.profile is None else (match.profile.policy, None)
        found = {"policy": policy, "refusal": refusal, "differences": match.differences}
        self.event("profile_compared", namespace=namespace.to_dict(), geometry=asdict(geometry), **found)

    def lookup(self, tracked: Any) -> None:
        """Log a TrackedRequest (connector/requests.py) whose look-up has ended."""
        plan: SemanticKvPlan | None = tracked.plan
        self.event(
            "lookup",
            request_id=tracked.request_id,
            found=tracked.runs_found > 0,
            num_computed_tokens=tracked.num_computed_tokens,
            num_new_matched_tokens=tracked.matched_tokens,
            kind=None if plan is None else plan.kind.value,
            reuse_ratio=0.0 if plan is None else round(plan.reused_tokens / plan.prompt_length, 4),
            rejection_reason=tracked.reason,
            diagnostics=None if plan is None else plan.diagnostics,
        )

    def dispatched(self, plan: SemanticKvPlan, data: Any) -> None:
        self.event(
            "plan_dispatched",
            request_id=plan.request_id,
            computed_position=data.computed_position,
            num_scheduled_tokens=data.num_scheduled_tokens,
            spans=[[span.donor_id, span.donor_start, span.target_start, span.length] for span in plan.spans],
            generation=max((span.generation for span in plan.spans), default=0),
        )

    def materialized(self, plan: SemanticKvPlan, reused_tokens: int) -> None:
        self.event(
            "materialized",
            request_id=plan.request_id,
            kind=plan.kind.value,
            segment_count=len(plan.spans),
            materialized=reused_tokens * plan.execution.num_layers,
            prefix_token_count=plan.prefix_end,
            computed_token_count=plan.num_computed_tokens,
            requires_rope_correction=any(span.shift for span in plan.spans),
        )

    def request_ended(self, request_id: int, report: ReuseReport) -> None:
        figures = {"outcome": report.outcome, "reason": report.reason} | report.figures
        self.event("request_settled", request_id=request_id, **figures)

    def saved(self, donor: SavedDonor, generation: int) -> None:
        fields = {"donor_id": donor.donor_id, "token_count": donor.tokens, "error": donor.error}
        self.event("donor_registered", generation=generation, **fields)

    def neighbours(self, request_id: int, nearest: tuple[Neighbour, ...]) -> None:
        """Log the nearest donors, on the neighbours' thread."""
        self.event("neighbours", request_id=request_id, nearest=[[n.donor_id, round(n.similarity, 4)] for n in nearest])


class _AppendFile:
    """Lines on their way to one file, which stays open from the first append to `close`."""

    def __init__(self, path: Path, max_waiting_bytes: int, dropped: Counter[str]) -> None:
        self._path, self._max_waiting_bytes, self._dropped = path, max_waiting_bytes, dropped
        # The lock guards these; what follows is the writing thread's alone.
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._waiting_bytes, self._closed = 0, False
        self._descriptor: int | None = None
        self._torn = self._warned = False
        self._background = Background("semblend-audit")

    def add(self, line: bytes | None) -> None:
        with self._lock:
            if line is None or self._closed or self._waiting_bytes + len(line) > self._max_waiting_bytes:
                self._dropped["not_json" if line is None else "closed" if self._closed else "slow_disk"] += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            is_first = len(self._lines) == 1
        if is_first:
            self._background.submit(self._write)

    def flush(self) -> None:
        if not self._closed:
            self._background.drain()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._background.submit(self._write)
        self._background.submit(lambda: None if self._descriptor is None else os.close(self._descriptor))
        if not self._background.close(_CLOSE_SECONDS):
            with self._lock:
                self._dropped["slow_disk"] += len(self._lines)
                self._lines = []
            logger.warning("audit events are lost, %s was not written within %g seconds", self._path, _CLOSE_SECONDS)

    def _write(self) -> None:
        with self._lock:
            lines, self._lines, self._waiting_bytes = self._lines, [], 0
        # A line torn by a full disk is ended first, so that only that line is lost to a reader.
        batch, written = (b"\n" if self._torn and lines else b"") + b"".join(lines), 0
        try:
            if batch and self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # A pipe without a reader is refused so; its opening would wait for ever.
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
                self._descriptor = os.open(self._path, flags, 0o644)
                os.set_blocking(self._descriptor, True)
            while self._descriptor is not None and written < len(batch):
                written += os.write(self._descriptor, batch[written:])
        except OSError as error:
            with self._lock:
                self._dropped["not_written"] += len(lines) - batch[self._torn : written].count(b"\n")
            if not self._warned:
                self._warned = True
                logger.warning("audit events are being lost, %s cannot be written: %s", self._path, error)
        if written:
            self._torn = not batch[:written].endswith(b"\n")
