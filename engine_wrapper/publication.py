"""Blocks that hold approximate KV never become reusable.

The embedded engine asks how much it may publish; for TensorRT-LLM's managers `trtllm.manager_guard` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semblend_trt.plan import CheckEvidence
    from semblend_trt.runtime import ActivePlans, Runtime


class PublicationGuard:
    """Tells the block manager how much of a request may enter the exact reuse tree.

    Everything that attended to approximate KV is approximate itself, so the limit is the first position that was not
    computed as a cold run would, and it holds for the prompt, the generated tokens and a late release alike.
    """

    def __init__(self, active_plans: ActivePlans) -> None:
        self._active_plans = active_plans

    def publishable(self, request_id: int, tokens: int) -> int:
        """How many of the first `tokens` tokens of the request may be published.

        The manager publishes whole blocks below this limit only: the other slots of the block that the exact part ends
        in hold, or will hold, approximate KV.
        """
        exact = self._active_plans.publishable_tokens(request_id)
        return tokens if exact is None else min(tokens, exact)

    def withholds(self, request_id: int) -> bool:
        """True when some of the request's KV may not be published: for cache managers that publish all or nothing."""
        return self._active_plans.publishable_tokens(request_id) is not None

    def released(self, request_id: int) -> None:
        """To be called once the blocks of the request are freed: the id may then be used again. A plan that no forward
        has run, because one failed before it came to that, is forgotten with them."""
        self._active_plans.take(request_id)
        self._active_plans.lift_limit(request_id)


def note_evidence(runtime: Runtime, evidence: CheckEvidence) -> None:
    """Keeps evidence for the scheduler. What a dropped plan had placed is written over: nothing approximate is left."""
    runtime.evidence.append(evidence)
    if evidence.is_dropped:
        runtime.active_plans.lift_limit(evidence.request_id)
