"""What `semblend-trt doctor` finds: the form of a finding; of a model and its profile; of TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

# A note is worth knowing and stops nothing; what is refused or failed does.
Status: TypeAlias = Literal["ok", "note", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about an area. `reason` is the name under which requests that are refused for it are counted."""

    area: str
    status: Status
    text: str
    reason: str | None = None

    @property
    def is_problem(self) -> bool:
        return self.status in ("refused", "failed")


@dataclass(frozen=True, slots=True)
class Area:
    """Findings of one area, in the words of their status."""

    area: str

    def ok(self, text: str) -> Finding:
        return Finding(self.area, "ok", text)

    def note(self, text: str, reason: str | None = None) -> Finding:
        return Finding(self.area, "note", text, reason)

    def refused(self, reason: str, text: str) -> Finding:
        return Finding(self.area, "refused", text, reason)

    def failed(self, text: str) -> Finding:
        return Finding(self.area, "failed", text)

    def collect(self, findings: Iterable[Finding]) -> Generator[Finding, None, Any]:
        """Yield `findings`, return what they return. An error becomes a failed finding: the other checks must go on."""
        try:
            return (yield from findings)
        except Exception as error:
            first_line = str(error).strip().split("\n", 1)[0]
            yield self.failed(f"cannot be checked: {type(error).__name__}: {first_line}"[:500])
            return None
