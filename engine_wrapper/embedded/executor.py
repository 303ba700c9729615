"""The iteration loop: schedule, ask and feed the connector, run, sample, finish, publish, poll transfers.

An iteration has TensorRT-LLM's order (`PyExecutor._executor_loop`, or `_executor_loop_overlap`): a connector sees here
what it would see there.

V1 is continuous batching under TensorRT-LLM's GUARANTEED_NO_EVICT, first come, first served. A request enters only if
the free blocks hold its prompt and answer, so no running request is ever paused. V1 allocates a prompt's blocks at
once. V2 (MAX_UTILIZATION) admits a request once its first chunk fits, allocates chunk by chunk, and takes the part of
the connector's offer that fits. It pauses the youngest requests when running ones find no block."""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from contextlib import contextmanager
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from engine_wrapper.embedded.block_manager import BlockManager, cache_layout, pool_of
from engine_wrapper.embedded.connector_manager import load_connector
from engine_wrapper.embedded.request import ScheduledBatch, largest_of
from engine_wrapper.token_schedule import SequenceSlice
from kernels.device import current_stream
from kernels.layout import KvGeometry
from semblend_trt.errors import CapacityError, ConfigurationError, SemBlendError
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
    from engine_wrapper.embedded.llm_args import LlmArgs
    from engine_wrapper.embedded.model_runner import ModelRunner
    from engine_wrapper.embedded.request import LlmRequest

logger = logging.getLogger(__name__)


class BatchScheduler:
    """Fills iterations of at most `max_num_tokens` rows from at most `max_batch_size` requests.

    Requests move from `waiting` to `active`, by id and oldest first; one enters only while none with a lower priority
    number runs. `pause` frees a request's blocks and puts it back into `waiting`."""

    def __init__(
        self,
        llm_args: LlmArgs,
        blocks: BlockManager,
        connector: KvCacheConnectorManager | None,
        pause: Callable[[LlmRequest], None],
    ) -> None:
        self.waiting: deque[LlmRequest] = deque()
        self.active: dict[int, LlmRequest] = {}
        self._args, self._is_v2 = llm_args, llm_args.is_v2
        self._blocks, self._connector, self._pause = blocks, connector, pause

    def line_up(self, request: LlmRequest, *, first: bool = False) -> None:
        """Insert a request after those of its priority that wait, or with `first` ahead of them."""
        find = bisect_left if first else bisect_right
        self.waiting.insert(find(self.waiting, request.priority, key=attrgetter("priority")), request)

    def schedule(self) -> ScheduledBatch:
        """Pick the next iteration, ask the connector about new requests, and allocate all blocks.

        The budget goes to generation first (one row each), then to prompts already in work, then to new ones."""
        running = list(self.active.values())
        batch = ScheduledBatch()
        batch.generation_requests = [request for request in running if not request.is_in_context]
        budget = self._args.max_num_tokens - len(batch.generation_requests)
        for request in running:
            if request.is_in_context:
                budget -= self._add_context(batch, request, budget)
        waiting = len(self.waiting)
        for request in batch.requests:
            if request in batch.requests:
                self._grow(batch, request)
        if len(self.waiting) > waiting:
            return batch  # what was paused would enter at once
        while self.waiting and len(self.active) < self._args.max_batch_size and self._admit(batch, budget):
            budget -= batch.context_requests[-1].context_chunk_size
        return batch

    # -- requests that run ----------------------------------------------------------------------------------------

    def _add_context(self, batch: ScheduledBatch, request: LlmRequest, budget: int) -> int:
        """Add the request's next chunk, if one fits into the budget; return its tokens."""
        chunk = self._chunk(request.context_remaining_length, request.context_current_position, budget)
        request.context_chunk_size = chunk
        if chunk:
            batch.context_requests.append(request)
        return chunk

    def _chunk(self, remaining: int, position: int, budget: int) -> int:
        """Return the tokens to run from `position`: the rest of the prompt, or up to a block boundary, or 0."""
        block = self._blocks.block_size
        if remaining <= budget:
            return remaining
        return 0 if budget < block else (position + budget) // block * block - position

    def _grow(self, batch: ScheduledBatch, request: LlmRequest) -> None:
        """Allocate the request's next rows, pausing younger requests for it; else it waits or is paused itself."""
        end = request.chunk_end if request.is_in_context else request.next_row()[0] + 1
        while self._blocks.room_for(request.request_id) < end:
            youngest = list(self.active.values())[-1]
            batch.remove(youngest)
            if len(self.active) == 1:
                return  # transfers hold the missing blocks, and will end
            self._pause(youngest)
            if youngest is request:
                return
        self._blocks.allocate(request.request_id, end)

    # -- new requests ---------------------------------------------------------------------------------------------

    def _admit(self, batch: ScheduledBatch, budget: int) -> bool:
        """Admit the next waiting request with its cached prefix and what fits of the connector's offer; False when it
        has to wait."""
        request, blocks, is_v2 = self.waiting[0], self._blocks, self._is_v2
        if any(running.priority < request.priority for running in self.active.values()):
            return False
        match = blocks.match(request.root_key, request.all_tokens)
        local = len(match.nodes) * blocks.block_size + match.partial_tokens
        chunk = self._chunk(request.prompt_len - local, local, budget)
        if not chunk or not blocks.fits(match, local + chunk if is_v2 else request.max_total_tokens):
            return False
        blocks.add_sequence(request.request_id, request.root_key, match, request.max_total_tokens)
        self.active[request.request_id] = self.waiting.popleft()
        room, offered = blocks.room_for(request.request_id), 0
        # With block reuse off the engine skips no loaded token, and does not ask the connector.
        if self._connector is not None and self._args.kv_cache_config.enable_block_reuse:
            offered = self._connector.ask(request, local, room - local - 1)
        request.set_prepopulated_prompt_len(local, offered)
        self._add_context(batch, request, budget)
        request.context_chunk_size = min(request.context_chunk_size, room - request.context_current_position)
        block_ids = blocks.allocate(request.request_id, request.chunk_end if is_v2 else request.prompt_len)
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, block_ids)
        return True


class Executor:
    """One engine: a model, its KV pool, and its requests. Methods are thread safe; a step runs in its caller's thread.

    A connector finds the executor as `runtime_for(llm_args).engine` and may set `model_runner.plan_source` and
    `block_manager.publication`. The executor shares `runner`'s weights, not its pool. If the arguments do not fit the
    model or the connector cannot be built, raises ConfigurationError, UnsupportedModelError or CapacityError."""

    def __init__(self, llm_args: LlmArgs, runner: ModelRunner) -> None:
        self.llm_args = llm_args
        self.model_runner = runner.share()
        cache, facts = llm_args.kv_cache_config, runner.facts
        self.max_seq_len = llm_args.max_seq_len or facts.max_positions
        if self.max_seq_len > facts.max_positions:
            raise ConfigurationError(
                f"max_seq_len {self.max_seq_len} exceeds the model's context of {facts.max_positions} tokens; lower it"
            )
        kv_dtype = torch.float8_e4m3fn if cache.dtype == "fp8" else runner.dtype
        if (facts.chunk or 0) % cache.tokens_per_block:
            raise ConfigurationError(
                f"kv_cache_config.tokens_per_block {cache.tokens_per_block} does not divide the chunks of "
                f"{facts.chunk} tokens that the model attends in; use a number that does"
            )
        self._is_v2 = llm_args.is_v2
        self.replays_decode = not llm_args.is_own
        self._eos_token_ids = runner.eos_token_ids
        geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, cache.tokens_per_block, facts.kv_factor)
        self.pool = pool_of(llm_args, self.max_seq_len, geometry, kv_dtype, runner.device)
        self.model_runner.attach_pool(self.pool, geometry, llm_args.max_num_tokens)
        self.block_manager = BlockManager(
            len(self.pool), cache, lambda source, target: self.pool[target].copy_(self.pool[source]), is_v2=self._is_v2
        )
        self._lock = threading.RLock()
        # Requests with a token that is not handled yet: the overlap scheduler handles tokens one iteration late.
        self._sampled: list[LlmRequest] = []
        # Why the engine takes no more requests; None while it does.
        self.failure: str | None = None
        self._late_ends: list[LlmRequest] = []
        runtime_for(llm_args).engine = self
        self.connector = load_connector(llm_args)
        self._scheduler = BatchScheduler(llm_args, self.block_manager, self.connector, self._pause)
        self._waiting, self._active = self._scheduler.waiting, self._scheduler.active
        if self.connector is not None:
            self._register(self.connector)

    def _register(self, connector: KvCacheConnectorManager) -> None:
        layout = cache_layout(self.pool, self.block_manager.block_size) if self._is_v2 else None
        connector.register(self.pool, layout)

    # -- requests -------------------------------------------------------------------------------------------------

    def enqueue(self, requests: list[LlmRequest]) -> None:
        """Take all of `requests`. If one of them can never fit, take none and raise CapacityError."""
        with self._lock:
            self._check_alive()
            for request in requests:
                self._check_fits(request)
            for request in requests:
                self._scheduler.line_up(request)

    def abort(self, request: LlmRequest) -> bool:
        """End an unfinished request; False when it has finished already.

        Its blocks become free at once, or when the connector has saved them."""
        with self._lock:
            if request.is_finished:
                return False
        with self._guarded():
            if request in self._waiting:
                self._waiting.remove(request)
                request.finish_reason = "cancelled"
                if request.is_paused and self.connector is not None:
                    self.connector.request_finished(request, [])
            else:
                self._finish(request, "cancelled")
                if self._is_v2 and not self.llm_args.disable_overlap_scheduler:
                    self._late_ends.append(request)
                if request.request_id in self.pending_transfers:
                    # TensorRT-LLM handles cancels after a forward and then polls, so the save begins before the next.
                    self.poll_transfers()
            return True

    @property
    def pending_transfers(self) -> list[int]:
        """Ids of requests whose KV the connector is saving."""
        return [] if self.connector is None else sorted(self.connector.saving)

    # -- the loop -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one iteration; False when there was nothing to run.

        A failed request ends with finish reason "error". If a forward fails and the contract's version survives that,
        all running requests end with "error". Any other error ends all requests and the engine, and is raised."""
        with self._guarded():
            batch = self._scheduler.schedule()
            stream = current_stream(self.model_runner.device)
            if self.connector is not None and len(batch):
                self.connector.handle_metadata(batch, self.block_manager.block_ids)
                self.connector.worker.start_load_kv(stream)
            ran = len(batch) > 0 or len(self._sampled) > 0
            if not len(batch):
                self._take_tokens()
            elif (logits := self._forward(batch, stream)) is not None:
                self._update(batch, logits)
            self.poll_transfers()
        return ran

    def poll_transfers(self) -> None:
        """Ask the connector which transfers have ended, and free the blocks that they held."""
        with self._guarded():
            if self.connector is None:
                return
            for request in self._late_ends:
                self.connector.request_finished(request, [], is_late=True)
            self._late_ends.clear()
            for request in self.connector.get_finished():
                self.block_manager.release(request.request_id)

    def shutdown(self) -> None:
        """Abort what is left and close the connector. Call once."""
        with self._lock:
            try:
                for request in [*self._waiting, *self._active.values()]:
                    self.abort(request)
            finally:
                self.failure = self.failure or "it was shut down"
                if self.connector is not None:
                    self.connector.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let one thread in at a time. An error that is raised inside ends the engine."""
        with self._lock:
            self._check_alive()
            try:
                yield
            except BaseException as error:
                self.failure = f"{type(error).__name__}: {error}"
                for request in [*self._waiting, *self._active.values()]:
                    if not request.is_finished:
                        request.error = f"the engine stopped: {self.failure}"
                        request.finish_reason = "error"
                    self.block_manager.release(request.request_id)
                self._waiting.clear()
                self._active.clear()
                self._sampled.clear()
                raise

    def _forward(self, batch: ScheduledBatch, stream: torch.cuda.Stream | None) -> torch.Tensor | None:
        """Return the logits of each request's last row, float32 [requests, vocabulary].

        If the forward fails, end all running requests and return None. A version that does not survive that raises."""
        connector, runner = self.connector, self.model_runner
        try:
            if connector is not None:
                worker = connector.worker
                runner.before_layer = lambda layer: worker.wait_for_layer_load(layer, stream)
                runner.after_layer = lambda layer: worker.save_kv_layer(layer, stream)
            forward = runner.replay if self.replays_decode and batch.runs_as_decode else runner.forward
            logits = forward([self._slice(request) for request in batch.requests])
            if connector is not None:
                connector.after_forward(stream)
            return logits
        except Exception as error:
            if self.llm_args.is_own or (self._is_v2 and not self.llm_args.disable_overlap_scheduler):
                raise
            logger.exception("a forward failed; the running requests end")
            self._sampled.clear()
            for request in list(self._active.values()):
                if not request.is_finished:
                    request.error = f"request {request.request_id} ran in a forward that failed: {error}"
                    self._finish(request, "error")
            return None

    def _slice(self, request: LlmRequest) -> SequenceSlice:
        block_ids = tuple(self.block_manager.block_ids(request.request_id))
        if not request.is_in_context:
            position, token = request.next_row()
            return SequenceSlice(request.request_id, position, (token,), block_ids)
        begin = request.context_current_position
        return SequenceSlice(request.request_id, begin, tuple(request.all_tokens[begin : request.chunk_end]), block_ids)

    def _update(self, batch: ScheduledBatch, logits: torch.Tensor) -> None:
        """Update every request of the batch: positions, new tokens, ends, and publication of the prompts' blocks.

        With the overlap scheduler it handles the tokens of the iteration before. If a request ends with them, its row
        of this batch is ignored."""
        if not self.llm_args.disable_overlap_scheduler:
            self._take_tokens()
        ready: list[tuple[int, LlmRequest]] = []
        for row, request in enumerate(batch.requests):
            if request.is_finished:
                continue
            if request.is_in_context:
                request.context_current_position = request.chunk_end
                if request.is_in_context:
                    continue
            ready.append((row, request))
        largest = largest_of(logits) if ready else []
        for row, request in ready:
            self._sample(request, logits[row], *largest[row])
        if self.llm_args.disable_overlap_scheduler:
            self._take_tokens()
        for request in batch.context_requests:
            if not request.is_finished:
                written = request.context_current_position
                written = written if self._is_v2 else min(written, request.prompt_len - 1)
                self.block_manager.publish(request.request_id, request.all_tokens[:written])

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _sample(self, request: LlmRequest, logits: torch.Tensor, best: float, token: int) -> None:
        """Choose the next token from `logits`, [vocabulary], with `best` at `token`. If that fails, end the request."""
        params = request.sampling_params
        if params.return_generation_logits:
            request.generation_logits.append(logits.clone())
        if params.forced_token_ids is not None:
            token = params.forced_token_ids[request.num_generated]
        elif not math.isfinite(best):
            request.error = f"request {request.request_id} failed: the model's logits are not finite"
            logger.error(request.error)
            self._finish(request, "error")
            return
        request.pending_token = token
        self._sampled.append(request)

    def _take_tokens(self) -> None:
        sampled, self._sampled = self._sampled, []
        for request in sampled:
            self._accept(request)

    def _accept(self, request: LlmRequest) -> None:
        """Handle the request's pending token, if there is one; that may end the request."""
        token = request.pending_token
        if token is None or request.is_finished:
            return
        request.pending_token = None
        request.all_tokens.append(token)
        if request.first_token_time is None:
            request.first_token_time = perf_counter()
        if request.reuse_report is None and self.connector is not None:
            request.reuse_report = self.connector.reuse_of(request.request_id)
        params = request.sampling_params
        is_end = token in (params.stop_token_ids or ()) or (not params.ignore_eos and token in self._eos_token_ids)
        if is_end and params.forced_token_ids is None:
            self._finish(request, "stop")
        elif request.num_generated == request.max_new_tokens:
            self._finish(request, "length")

    # -- ends -----------------------------------------------------------------------------------------------------

    def _finish(self, request: LlmRequest, reason: str) -> None:
        """End a running request: offer its blocks for reuse if it came to its end, then free or save them.

        During a save it keeps all its blocks or only those in the reuse tree, as the cache manager has it."""
        request_id = request.request_id
        request.finish_reason = reason
        del self._active[request_id]
        if not request.was_cut_short and not self._is_v2:  # V2 publishes prompts only
            self.block_manager.publish(request_id, request.all_tokens[:-1])  # the newest token's KV is not written
        block_ids = self.block_manager.block_ids(request_id)
        if self.connector is None or not self.connector.request_finished(request, block_ids):
            self.block_manager.release(request_id)
        elif self._is_v2 or self.llm_args.holds_saved_blocks:
            self.block_manager.stop_growing(request_id)
        else:
            self.block_manager.pin(request_id)

    def _pause(self, request: LlmRequest) -> None:
        """Put a running request back among the waiting ones, unless its pending token ends it."""
        self._accept(request)
        if request.is_finished:
            return
        del self._active[request.request_id]
        self.block_manager.release(request.request_id)
        request.pause()
        if self.connector is not None:
            self.connector.forget(request.request_id)
        self._scheduler.line_up(request, first=True)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise SemBlendError(f"this engine has stopped ({self.failure}); build a new one")

    def _check_fits(self, request: LlmRequest) -> None:
        """Raise CapacityError when the request could not run even on an empty engine."""
        total, blocks = request.max_total_tokens, self.block_manager
        asked = f"a prompt of {request.prompt_len} tokens with {request.max_new_tokens} new ones"
        if total > self.max_seq_len:
            raise CapacityError(
                f"{asked} exceeds max_seq_len {self.max_seq_len}; shorten the prompt or lower max_tokens"
            )
        if blocks.blocks_for(total) > blocks.num_blocks:
            raise CapacityError(
                f"{asked} needs {blocks.blocks_for(total)} blocks of {blocks.block_size} tokens, the KV pool has "
                f"{blocks.num_blocks}; raise kv_cache_config.max_tokens"
            )
