"""Keeps blocks with approximate KV from becoming reusable.

The embedded engine asks the guard how much it may publish. For TensorRT-LLM's managers `trtllm.manager_guard` asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semblend_trt.plan import CheckEvidence
    from semblend_trt.runtime import ActivePlans, Runtime


class PublicationGuard:
    """Tells a block manager how much of a request may enter the exact reuse tree.

    KV that attended to approximate KV is approximate too. So the limit is the first position that a cold run would have
    computed otherwise; it holds for the prompt, the generated tokens and a late release.
    """

    def __init__(self, active_plans: ActivePlans) -> None:
        self._active_plans = active_plans

    def publishable(self, request_id: int, tokens: int) -> int:
        """How many of the first `tokens` tokens of the request may be published.

        The manager may publish only whole blocks below this limit: the block in which the exact part ends also holds
        approximate KV.
        """
        exact = self._active_plans.publishable_tokens(request_id)
        return tokens if exact is None else min(tokens, exact)

    def withholds(self, request_id: int) -> bool:
        """True when some of the request's KV may not be published; for managers that publish all of it or nothing."""
        return self._active_plans.publishable_tokens(request_id) is not None

    def released(self, request_id: int) -> None:
        """Call it once the request's blocks are freed; its id may then be used again. A plan that no forward has run is
        forgotten too."""
        self._active_plans.take(request_id)
        self._active_plans.lift_limit(request_id)


def note_evidence(runtime: Runtime, evidence: CheckEvidence) -> None:
    """Keeps evidence for the scheduler. A dropped plan's KV was written over, so its request is exact again."""
    runtime.evidence.append(evidence)
    if evidence.is_dropped:
        runtime.active_plans.lift_limit(evidence.request_id)
