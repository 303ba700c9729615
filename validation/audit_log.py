"""A connector's audit log: its events, how requests ended, and counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import SemBlendError
from semblend_trt.files import open_input

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """Names as the SemBlend package's validation reports them.

    `semantic_hits`: look-ups that found a donor; `materializations`: requests whose plan was carried out;
    `materialized_units`: tokens times layers moved; `incremental_matched_tokens`: tokens promised to the engine beyond
    those it had; `rope_corrections`: carried-out plans that moved KV to other positions.
    """

    events: int = 0
    donor_registrations: int = 0
    semantic_hits: int = 0
    materializations: int = 0
    materialized_units: int = 0
    incremental_matched_tokens: int = 0
    rope_corrections: int = 0
    rejection_reasons: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]], arm: str) -> AuditCounts:
        """Counts the events whose `arm` is `arm`."""
        ours = [event for event in events if event["arm"] == arm]
        lookups = [event for event in ours if event["event"] == "lookup"]
        materialized = [event for event in ours if event["event"] == "materialized"]
        reasons = Counter(event["rejection_reason"] for event in lookups if event.get("rejection_reason"))
        return cls(
            events=len(ours),
            donor_registrations=sum(event["event"] == "donor_registered" and not event.get("error") for event in ours),
            semantic_hits=sum(bool(event["found"]) for event in lookups),
            materializations=len(materialized),
            materialized_units=sum(event["materialized"] for event in materialized),
            incremental_matched_tokens=sum(event["num_new_matched_tokens"] for event in lookups),
            rope_corrections=sum(bool(event["requires_rope_correction"]) for event in materialized),
            rejection_reasons=tuple(sorted(reasons.items())),
        )


@dataclass(slots=True)
class AuditFile:
    """The events of an audit file in order, as far as they were read; none when the file was never written."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0

    def read(self) -> None:
        """Adds the events whose lines are whole by now."""
        if not self.path.exists():
            return
        with open_input(self.path) as file:
            file.seek(self._read_bytes)
            lines, newline, _ = file.read().rpartition(b"\n")
        self.events += [json.loads(line) for line in lines.splitlines() if line]
        self._read_bytes += len(lines) + len(newline)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of an audit file that is written no more."""
    audit = AuditFile(path)
    audit.read()
    return audit.events


def ended_requests(events: Iterable[dict[str, Any]], asked: int = 0) -> list[dict[str, Any]]:
    """The events that tell how requests ended, by request. Raises SemBlendError for fewer than `asked`."""
    ended = [event for event in events if event["event"] == "request_settled"]
    if len(ended) < asked:
        raise SemBlendError(
            f"The connector's audit log tells the end of {len(ended)} requests, but {asked} were served; without it "
            "nothing shows what was reused. The engine's log says why, or the disk of the temporary folder was slow."
        )
    return sorted(ended, key=lambda event: int(event["request_id"]))


def concerns(event: dict[str, Any], request_ids: frozenset[int]) -> bool:
    """True when the event is about one of the requests or the donor that one of them became."""
    if event.get("request_id") in request_ids:
        return True
    donor_id = event.get("donor_id")
    return isinstance(donor_id, str) and donor_id.rpartition("-")[2] in {str(number) for number in request_ids}
