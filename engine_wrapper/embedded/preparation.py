"""Gives the requests of an iteration their blocks, and asks the connector about the new ones.

V1 allocates a prompt's blocks at once and takes all that the connector offers. V2 allocates chunk by chunk, takes what
fits of an offer, and pauses the youngest requests when running ones find no block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_wrapper.embedded.request import LlmRequestState

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from engine_wrapper.embedded.batch_scheduler import BatchScheduler, ScheduledBatch
    from engine_wrapper.embedded.block_manager import BlockManager
    from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
    from engine_wrapper.embedded.request import LlmRequest

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
