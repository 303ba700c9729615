"""LayoutError: the engine is not, or does not call its parts, as is known."""

from __future__ import annotations

from semblend_trt.errors import SemBlendError


class LayoutError(SemBlendError):
    """Plans cannot be executed on this engine; `reason` is the short name under which that is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
