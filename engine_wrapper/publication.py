"""Blocks that hold approximate KV never become reusable.

The embedded engine asks how much it may publish; for TensorRT-LLM's managers `trtllm.manager_guard` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from semblend_trt.runtime import ActivePlans


class PublicationGuard:
    """Tells the block manager how much of a request may enter the exact reuse tree.

    Everything that attended to approximate KV is approximate itself, so the limit is the first position that was not
    computed as a cold run would, and it holds for the prompt, the generated tokens and a late release alike.
    `block_size` rounds the limit down to whole blocks; 1 leaves that to a block manager that publishes no others.
    """

    def __init__(self, active_plans: ActivePlans, block_size: int = 1) -> None:
        if block_size < 1:
            raise ConfigurationError(f"block_size is {block_size}; a block holds at least 1 token")
        self._active_plans = active_plans
        self._block_size = block_size

    def publishable(self, request_id: int, tokens: int) -> int:
        """How many of the first `tokens` tokens of the request may be published.

        All of them when the request's KV is exact. Otherwise nothing of a block that reaches beyond the exact part:
        its other slots hold, or will hold, approximate KV.
        """
        exact = self._active_plans.publishable_tokens(request_id)
        if exact is None:
            return tokens
        return min(tokens, exact - exact % self._block_size)

    def withholds(self, request_id: int) -> bool:
        """True when some of the request's KV may not be published: for cache managers that publish all or nothing."""
        return self._active_plans.publishable_tokens(request_id) is not None

    def released(self, request_id: int) -> None:
        """To be called once the blocks of the request are freed: the id may then be used again. A plan that no forward
        has run, because one failed before it came to that, is forgotten with them."""
        self._active_plans.discard(request_id)
        self._active_plans.released(request_id)
