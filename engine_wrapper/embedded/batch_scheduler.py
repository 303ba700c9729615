"""Which requests run in an iteration, and how many of their tokens.

Continuous batching under TensorRT-LLM's GUARANTEED_NO_EVICT: first come, first served; a request enters only if prompt
and answer fit into the blocks that are left, so nothing that runs is ever paused. Under MAX_UTILIZATION (V2) it enters
as soon as its first chunk fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_wrapper.embedded.request import LlmRequestState

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable

    from engine_wrapper.embedded.block_manager import BlockManager
    from engine_wrapper.embedded.request import LlmRequest


@dataclass(slots=True)
class ScheduledBatch:
    """One iteration in the order of its rows: context requests, then generation requests. `admitted` are the context
    requests that entered in this iteration: their cached prefix is set, their blocks are not allocated."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    admitted: list[LlmRequest] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.context_requests) + len(self.generation_requests)

    @property
    def requests(self) -> list[LlmRequest]:
        return [*self.context_requests, *self.generation_requests]

    def remove(self, request: LlmRequest) -> None:
        """Takes the request out of the iteration, wherever it is in it."""
        for requests in (self.context_requests, self.generation_requests, self.admitted):
            if request in requests:
                requests.remove(request)


class BatchScheduler:
    """Fills iterations of at most `max_num_tokens` rows from at most `max_batch_size` requests."""

    def __init__(
        self,
        max_batch_size: int,
        max_num_tokens: int,
        block_size: int,
        *,
        enable_chunked_prefill: bool,
        guarantees: bool = True,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._block_size = block_size
        self._chunked = enable_chunked_prefill
        self._guarantees = guarantees

    def schedule(
        self, active: Iterable[LlmRequest], waiting: deque[LlmRequest], blocks: BlockManager
    ) -> ScheduledBatch:
        """Picks the next iteration; admitted requests leave `waiting` and own their matched prefix in `blocks`.

        Generation comes first in the budget (one row each), then prompts already begun, then new ones.
        """
        running = list(active)
        batch = ScheduledBatch()
        batch.generation_requests = [r for r in running if r.state is LlmRequestState.GENERATION_IN_PROGRESS]
        budget = self._max_num_tokens - len(batch.generation_requests)
        for request in running:
            if request.state is LlmRequestState.CONTEXT_INIT:
                budget = self._add_context(batch, request, budget)
        places = self._max_batch_size - len(running)
        while waiting and places > 0 and self._admit(batch, waiting[0], blocks, budget):
            budget = self._add_context(batch, waiting.popleft(), budget)
            places -= 1
        return batch

    def resize_chunk(self, request: LlmRequest) -> None:
        """Cuts the chunk anew after the connector has moved the request's position forward."""
        request.context_chunk_size = self._chunk(
            request.context_remaining_length, request.context_current_position, request.chunk_allowance
        )

    def _admit(self, batch: ScheduledBatch, request: LlmRequest, blocks: BlockManager, budget: int) -> bool:
        match = blocks.match(request.root_key, request.all_tokens)
        matched = len(match.nodes) * blocks.block_size + match.partial_tokens
        chunk = self._chunk(request.prompt_len - matched, matched, budget)
        if not chunk or not blocks.fits(match, request.max_total_tokens if self._guarantees else matched + chunk):
            return False
        blocks.add_sequence(request.request_id, request.root_key, match, request.max_total_tokens)
        request.set_prepopulated_prompt_len(matched, 0)
        request.state = LlmRequestState.CONTEXT_INIT
        batch.admitted.append(request)
        return True

    def _add_context(self, batch: ScheduledBatch, request: LlmRequest, budget: int) -> int:
        """Adds the request's next chunk and returns the budget that is left."""
        request.chunk_allowance = budget
        self.resize_chunk(request)
        if not request.context_chunk_size:
            return budget
        batch.context_requests.append(request)
        # A chunk that is not the last takes all that is left: the connector may still move it to another start.
        return budget - request.context_chunk_size if request.is_last_context_chunk else 0

    def _chunk(self, remaining: int, position: int, budget: int) -> int:
        """Tokens to run from `position`: the rest of the prompt, or up to a block boundary, or none."""
        if remaining <= budget:
            return remaining
        if not self._chunked or budget < self._block_size:
            return 0
        return (position + budget) // self._block_size * self._block_size - position
