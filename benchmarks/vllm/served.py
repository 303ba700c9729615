"""How our connector served a benchmark's requests, and whether that shows reuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semblend_trt.plan import EngineMode

if TYPE_CHECKING:
    from collections.abc import Sequence

# If less than this share of the tokens in donors is reused, a figure says nothing about reuse.
SERVED_SHARE = 0.9


@dataclass(slots=True)
class Served:
    """How our connector served some requests: empty in stock vLLM."""

    counts: dict[str, Any] = field(default_factory=dict)

    def problem(self, in_donors: int) -> str | None:
        """Return why the requests do not show reuse: `in_donors` of their tokens are in donors."""
        counts = self.counts
        if not counts:
            return None
        if counts["mode"] != EngineMode.WRAPPER.value or counts["refusal"] or counts["faults"]:
            return f"mode {counts['mode']}, refusal {counts['refusal']}, faults {counts['faults']}"
        declined = counts["outcomes"].get("backend_declined_reuse", 0)
        if declined:
            return f"{declined} of {counts['requests']} requests were declined: {counts['reasons']}"
        reused = counts["exact_prefix_tokens"] + counts["reused_tokens"]
        if reused < SERVED_SHARE * in_donors:
            return f"{reused} of {in_donors} tokens in donors were reused: {counts['outcomes']}, {counts['reasons']}"
        return None


def sums(reports: Sequence[Any]) -> dict[str, int]:
    """Return tokens of some requests together, by what became of them."""
    names = ("exact_prefix_tokens", "offered_tokens", "sampled_tokens", "checked_tokens", "reused_tokens")
    return {"requests": len(reports)} | {name: sum(getattr(each, name) or 0 for each in reports) for name in names}
