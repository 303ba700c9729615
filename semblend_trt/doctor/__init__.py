"""What `semblend-trt doctor` finds: the form of a finding; of a model and its profile; of TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable


class Status(str, Enum):
    """`NOTE` is worth knowing and stops nothing; `REFUSED` and `FAILED` do."""

    OK = "ok"
    NOTE = "note"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about an area. `reason` is the name under which requests that are refused for it are counted."""

    area: str
    status: Status
    text: str
    reason: str | None = None

    @property
    def is_problem(self) -> bool:
        return self.status in (Status.REFUSED, Status.FAILED)


@dataclass(frozen=True, slots=True)
class Area:
    """Findings of one area, in the words of their status."""

    area: str

    def ok(self, text: str) -> Finding:
        return Finding(self.area, Status.OK, text)

    def note(self, text: str, reason: str | None = None) -> Finding:
        return Finding(self.area, Status.NOTE, text, reason)

    def refused(self, reason: str, text: str) -> Finding:
        return Finding(self.area, Status.REFUSED, text, reason)

    def failed(self, text: str) -> Finding:
        return Finding(self.area, Status.FAILED, text)

    def collect(self, findings: Iterable[Finding]) -> Generator[Finding, None, Any]:
        """Yield `findings`, return what they return. An error becomes a failed finding: the other checks must go on."""
        try:
            return (yield from findings)
        except Exception as error:
            first_line = str(error).strip().split("\n", 1)[0]
            yield self.failed(f"cannot be checked: {type(error).__name__}: {first_line}"[:500])
            return None
