"""TransferTiming: how long a donor's way between tiers took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """One transfer that succeeded; `seconds` to its last byte from its start in the background, or a save's in the
    engine's thread."""

    donor_id: str
    what: str
    tokens: int
    seconds: float
