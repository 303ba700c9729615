"""TransferTiming: how long a donor's way between tiers took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """One transfer that succeeded; `seconds` from its start in the background to its last byte."""

    donor_id: str
    what: str
    tokens: int
    seconds: float
