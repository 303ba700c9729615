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
    from collections.abc import Callable, Iterable

    from engine_wrapper.embedded.block_manager import BlockManager
    from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
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


_PAUSABLE = (LlmRequestState.CONTEXT_INIT, LlmRequestState.GENERATION_IN_PROGRESS)


class Preparation:
    """As the V1 cache manager does it. `connector` None asks nobody; `asks` off still tells it about blocks.

    `applies` off asks, and computes what was offered all the same.
    """

    def __init__(
        self,
        blocks: BlockManager,
        scheduler: BatchScheduler,
        connector: KvCacheConnectorManager | None,
        *,
        asks: bool,
        applies: bool = True,
    ) -> None:
        self._blocks, self._scheduler, self._connector = blocks, scheduler, connector
        self._asks = asks and connector is not None
        self._applies = applies

    def prepare(self, batch: ScheduledBatch) -> None:
        """Allocates for every request of `batch`; requests that find no room leave it."""
        for request in batch.admitted:
            if self._asks:
                self._ask(request)
                self._scheduler.resize_chunk(request)
            block_ids = self._blocks.allocate(request.request_id, request.prompt_len)
            if self._connector is not None:
                self._connector.update_state_after_alloc(request, block_ids)
        for request in batch.generation_requests:
            self._blocks.allocate(request.request_id, request.next_row()[0] + 1)

    def _ask(self, request: LlmRequest) -> None:
        assert self._connector is not None
        local = told = request.cached_tokens
        if self._connector.version.floors_local_match:
            told -= told % self._blocks.block_size
        matched = self._connector.get_num_new_matched_tokens(request, told)
        if matched and self._applies:
            request.set_prepopulated_prompt_len(told, matched)
        else:
            request.set_prepopulated_prompt_len(local, 0)


class ChunkwisePreparation(Preparation):
    """As the V2 cache manager does it. `running` are the requests admitted, oldest first; `pause` takes the blocks of
    one away and puts it back among `waiting`."""

    def __init__(
        self,
        blocks: BlockManager,
        scheduler: BatchScheduler,
        connector: KvCacheConnectorManager | None,
        *,
        asks: bool,
        running: dict[int, LlmRequest],
        waiting: deque[LlmRequest],
        pause: Callable[[LlmRequest], None],
    ) -> None:
        super().__init__(blocks, scheduler, connector, asks=asks)
        self._running, self._waiting, self._pause = running, waiting, pause

    def prepare(self, batch: ScheduledBatch) -> None:
        for request in [*batch.generation_requests, *batch.context_requests]:
            if request in batch.requests and request not in batch.admitted:
                self._grow(batch, request)
        refused = [request for request in list(batch.admitted) if not self._enter(request)]
        for request in reversed(refused):
            batch.remove(request)
            self._blocks.release(request.request_id)
            del self._running[request.request_id]
            request.state = LlmRequestState.QUEUED
            self._waiting.appendleft(request)

    def _grow(self, batch: ScheduledBatch, request: LlmRequest) -> None:
        """Room for the request's next rows, taken from younger requests; without any, it waits or is paused itself."""
        in_context = request.state is LlmRequestState.CONTEXT_INIT
        end = _chunk_end(request) if in_context else request.next_row()[0] + 1
        while self._blocks.room_for(request.request_id) < end:
            pausable = [
                each for each in self._running.values() if each.state in _PAUSABLE and each not in batch.admitted
            ]
            if not pausable or pausable == [request]:
                batch.remove(request)  # what is missing is held by transfers, which end
                return
            youngest = pausable[-1]
            batch.remove(youngest)
            self._pause(youngest)
            if youngest is request:
                return
        self._blocks.allocate(request.request_id, end)

    def _enter(self, request: LlmRequest) -> bool:
        """Asks about a new request and takes what fits of the offer; False when not even a token would fit now."""
        local = request.cached_tokens
        room = self._blocks.room_for(request.request_id)
        if room <= local:
            return False
        if self._asks:
            assert self._connector is not None
            matched, asynchronous = self._connector.query(request, local)
            honoured = min(matched, room - local - 1)
            request.set_prepopulated_prompt_len(local, honoured)
            self._connector.commit(request, honoured, asynchronous=asynchronous)
        self._scheduler.resize_chunk(request)
        request.context_chunk_size = min(request.context_chunk_size, room - request.context_current_position)
        block_ids = self._blocks.allocate(request.request_id, _chunk_end(request))
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, block_ids)
        return True


def _chunk_end(request: LlmRequest) -> int:
    return request.context_current_position + request.context_chunk_size
