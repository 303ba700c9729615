"""Which requests run in an iteration, with how many of their tokens and in which blocks.

V1 is continuous batching under TensorRT-LLM's GUARANTEED_NO_EVICT, first come, first served. A request enters only if
the free blocks hold its prompt and answer, so no running request is ever paused. V1 allocates a prompt's blocks at
once. A request enters only while none with a lower priority number runs.

V2 (MAX_UTILIZATION) admits a request once its first chunk fits, allocates chunk by chunk, and takes the part of the
connector's offer that fits. It pauses the youngest requests when running ones find no block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING

from engine_wrapper.embedded.request import LlmRequestState, ScheduledBatch

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from engine_wrapper.embedded.block_manager import BlockManager
    from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
    from engine_wrapper.embedded.llm_args import LlmArgs
    from engine_wrapper.embedded.request import LlmRequest

_PAUSABLE = (LlmRequestState.CONTEXT_INIT, LlmRequestState.GENERATION_IN_PROGRESS)


def line_up(waiting: deque[LlmRequest], request: LlmRequest, *, first: bool = False) -> None:
    """Insert a request after those of its priority, or with `first` ahead of them."""
    find = bisect_left if first else bisect_right
    waiting.insert(find(waiting, request.priority, key=attrgetter("priority")), request)


class BatchScheduler:
    """Fills iterations of at most `max_num_tokens` rows from at most `max_batch_size` requests.

    Requests move from `waiting`, in the order of `line_up`, to `active`, by id and oldest first. `pause` frees a
    request's blocks and puts it back into `waiting`."""

    def __init__(
        self,
        llm_args: LlmArgs,
        blocks: BlockManager,
        active: dict[int, LlmRequest],
        waiting: deque[LlmRequest],
        connector: KvCacheConnectorManager | None,
        pause: Callable[[LlmRequest], None],
    ) -> None:
        self._args, self._blocks, self._connector = llm_args, blocks, connector
        self._active, self._waiting, self._pause = active, waiting, pause
        self._is_v2 = llm_args.is_v2
        # With block reuse off the engine skips no loaded token, and does not ask the connector.
        self._asks = llm_args.kv_cache_config.enable_block_reuse

    def schedule(self) -> ScheduledBatch:
        """Pick the next iteration, ask the connector about new requests, and allocate all blocks.

        The budget goes to generation first (one row each), then to prompts already in work, then to new ones."""
        running = list(self._active.values())
        batch = ScheduledBatch()
        batch.generation_requests = [r for r in running if r.state is LlmRequestState.GENERATION_IN_PROGRESS]
        budget = self._args.max_num_tokens - len(batch.generation_requests)
        for request in running:
            if request.is_in_context:
                budget = self._add_context(batch, request, budget)
        while self._waiting and len(self._active) < self._args.max_batch_size and self._admit(batch, budget):
            budget = self._add_context(batch, batch.admitted[-1], budget)
        self._allocate(batch)
        return batch

    # -- picking --------------------------------------------------------------------------------------------------

    def _admit(self, batch: ScheduledBatch, budget: int) -> bool:
        """Admit the next waiting request with its cached prefix; False when it has to wait."""
        request, blocks = self._waiting[0], self._blocks
        if any(running.priority < request.priority for running in self._active.values()):
            return False
        match = blocks.match(request.root_key, request.all_tokens)
        matched = len(match.nodes) * blocks.block_size + match.partial_tokens
        chunk = self._chunk(request.prompt_len - matched, matched, budget)
        if not chunk or not blocks.fits(match, matched + chunk if self._is_v2 else request.max_total_tokens):
            return False
        blocks.add_sequence(request.request_id, request.root_key, match, request.max_total_tokens)
        request.set_prepopulated_prompt_len(matched, 0)
        request.state = LlmRequestState.CONTEXT_INIT
        self._active[request.request_id] = self._waiting.popleft()
        batch.admitted.append(request)
        return True

    def _add_context(self, batch: ScheduledBatch, request: LlmRequest, budget: int) -> int:
        """Add the request's next chunk; return the budget that is left."""
        request.chunk_allowance = budget
        self._resize_chunk(request)
        if not request.context_chunk_size:
            return budget
        batch.context_requests.append(request)
        # A chunk that is not the last takes the whole budget: the connector may still move its start.
        return budget - request.context_chunk_size if request.chunk_end == request.prompt_len else 0

    def _resize_chunk(self, request: LlmRequest) -> None:
        remaining, position = request.context_remaining_length, request.context_current_position
        request.context_chunk_size = self._chunk(remaining, position, request.chunk_allowance)

    def _chunk(self, remaining: int, position: int, budget: int) -> int:
        """Return the tokens to run from `position`: the rest of the prompt, or up to a block boundary, or 0."""
        block = self._blocks.block_size
        if remaining <= budget:
            return remaining
        if budget < block:
            return 0
        return (position + budget) // block * block - position

    # -- blocks, and what the connector offers --------------------------------------------------------------------

    def _allocate(self, batch: ScheduledBatch) -> None:
        """Allocate the batch's blocks. Requests that find no room leave it, which happens under V2 alone."""
        for request in [*batch.generation_requests, *batch.context_requests]:
            if request in batch.requests and request not in batch.admitted:
                self._grow(batch, request)
        for request in reversed([request for request in list(batch.admitted) if not self._enter(request)]):
            batch.remove(request)
            self._blocks.release(request.request_id)
            del self._active[request.request_id]
            request.state = LlmRequestState.QUEUED
            line_up(self._waiting, request, first=True)

    def _grow(self, batch: ScheduledBatch, request: LlmRequest) -> None:
        """Allocate the request's next rows, pausing younger requests for it; else it waits or is paused itself."""
        end = request.chunk_end if request.is_in_context else request.next_row()[0] + 1
        while self._blocks.room_for(request.request_id) < end:
            pausable = [r for r in self._active.values() if r.state in _PAUSABLE and r not in batch.admitted]
            if not pausable or pausable == [request]:
                batch.remove(request)  # transfers hold the missing blocks, and will end
                return
            youngest = pausable[-1]
            batch.remove(youngest)
            self._pause(youngest)
            if youngest is request:
                return
        self._blocks.allocate(request.request_id, end)

    def _enter(self, request: LlmRequest) -> bool:
        """Ask about a new request and take the part of the offer that fits; False when no token fits now."""
        local, room = request.cached_tokens, self._blocks.room_for(request.request_id)
        if room <= local:
            return False
        if self._connector is not None and self._asks:
            request.set_prepopulated_prompt_len(local, self._connector.ask(request, local, room - local - 1))
        self._resize_chunk(request)
        request.context_chunk_size = min(request.context_chunk_size, room - request.context_current_position)
        end = request.chunk_end if self._is_v2 else request.prompt_len
        block_ids = self._blocks.allocate(request.request_id, end)
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, block_ids)
        return True
