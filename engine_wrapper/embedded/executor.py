"""The iteration loop: schedule, ask and feed the connector, run, sample, finish, publish, poll transfers.

The order within an iteration is TensorRT-LLM's (`PyExecutor._executor_loop`, and `_executor_loop_overlap` where asked
for), so that a connector sees here what it would see there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from engine_wrapper.embedded.batch_scheduler import BatchScheduler, ChunkwisePreparation, Preparation
from engine_wrapper.embedded.block_manager import BlockManager, ReuseRules
from engine_wrapper.embedded.connector_manager import load_connector, uses_v2
from engine_wrapper.embedded.pool import KvPool, cache_layout, pool_blocks
from engine_wrapper.embedded.request import LlmRequestState
from engine_wrapper.embedded.sampling import BatchLogits, Sampler, finish_reason, next_token
from engine_wrapper.sequence_work import SequenceSlice
from kernels.layout import KvGeometry
from semblend_trt.connector.contract import contract_version
from semblend_trt.errors import CapacityError, ConfigurationError, SemBlendError
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from engine_wrapper.embedded.batch_scheduler import ScheduledBatch
    from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
    from engine_wrapper.embedded.llm_args import LlmArgs
    from engine_wrapper.embedded.model_runner import ModelRunner
    from engine_wrapper.embedded.request import LlmRequest
    from engine_wrapper.embedded.sampling import SamplingParams

logger = logging.getLogger(__name__)


class Executor:
    """One engine: a model, its KV pool, and the requests in it. All methods are thread safe; a step runs in the
    thread that calls it.

    The connector, where `llm_args` names one, finds the executor as `runtime_for(llm_args).engine` and may set
    `model_runner.plan_source` and `block_manager.publication`. `runner`'s weights are shared, its pool is not.

    Raises ConfigurationError or CapacityError when the arguments do not fit the model or the connector cannot be
    built.
    """

    def __init__(self, llm_args: LlmArgs, runner: ModelRunner) -> None:
        self.llm_args = llm_args
        self.model_runner = runner.share()
        self.max_seq_len = max_seq_len(llm_args, runner.facts.max_positions)
        cache = llm_args.kv_cache_config
        geometry = KvGeometry(runner.facts.num_layers, runner.kv_heads, runner.facts.head_dim, cache.tokens_per_block)
        check_cache_dtype(cache.dtype, runner.dtype)
        blocks = pool_blocks(llm_args, self.max_seq_len, geometry, runner.dtype)
        self._version = contract_version(llm_args.contract)
        layout = self._version.flashinfer_layout if llm_args.attn_backend == "FLASHINFER" else "HND"
        self.pool = KvPool(blocks, geometry, runner.dtype, runner.device, layout)
        self.model_runner.attach_pool(self.pool.computed, geometry, llm_args.max_num_tokens)
        rules = ReuseRules(cache.enable_block_reuse, cache.enable_partial_reuse, cache.copy_on_partial_reuse)
        self._is_v2 = uses_v2(llm_args)
        self.block_manager = BlockManager(
            blocks,
            cache.tokens_per_block,
            self.pool.copy_block,
            rules,
            guarantees=not self._is_v2,
            replaces=self._version.holds_saved_blocks,
        )
        self._scheduler = BatchScheduler(
            llm_args.max_batch_size,
            llm_args.max_num_tokens,
            cache.tokens_per_block,
            enable_chunked_prefill=llm_args.enable_chunked_prefill,
            guarantees=not self._is_v2,
        )
        self._lock = threading.RLock()
        self._waiting: deque[LlmRequest] = deque()
        self._active: dict[int, LlmRequest] = {}
        self._failure: str | None = None
        self._interrupt: KeyboardInterrupt | None = None
        self._closed = False
        runtime_for(llm_args).engine = self
        self.connector = load_connector(llm_args, runner.ranks)
        if self.connector is not None:
            groups = llm_args.layer_groups
            described = cache_layout(self.pool.tensor, cache.tokens_per_block, groups) if self._is_v2 else None
            self.connector.register(self.pool.tensor, described)
        self._ends = RequestEnds(llm_args, self._active, self.block_manager, self.connector, prompts_only=self._is_v2)
        self._results = TokenResults(runner.eos_token_ids, self.connector, self._ends.finish)
        self._preparation = self._new_preparation()

    def _new_preparation(self) -> Preparation:
        # With block reuse off nothing that was loaded would be skipped; most versions do not ask then.
        applies = self.llm_args.kv_cache_config.enable_block_reuse
        if not self._is_v2:
            asks = applies or self._version.asks_without_reuse
            return Preparation(self.block_manager, self._scheduler, self.connector, asks=asks, applies=applies)
        return ChunkwisePreparation(
            self.block_manager,
            self._scheduler,
            self.connector,
            asks=applies,
            running=self._active,
            waiting=self._waiting,
            pause=self._pause,
        )

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Layers in which the connector's plans may check their spans."""
        layers = runtime_for(self.llm_args).check_layers
        return tuple(layer for layer in layers if layer < self.model_runner.facts.num_layers)

    # -- requests -------------------------------------------------------------------------------------------------

    def enqueue(self, requests: list[LlmRequest]) -> None:
        """Takes all of `requests`, or none: CapacityError when one of them can never fit."""
        with self._lock:
            self._check_alive()
            for request in requests:
                check_fits(request, self.llm_args, self.max_seq_len, self.block_manager)
            for request in requests:
                request.generator = self._results.generator(request.sampling_params)
                self._waiting.append(request)

    def abort(self, request: LlmRequest) -> bool:
        """Ends an unfinished request; False when it has finished already.

        Its blocks are free at once, unless a load into them is under way: then as soon as the connector reports it,
        where the contract's version waits for that.
        """
        with self._lock:
            if request.is_finished:
                return False
        with self._guarded():
            if request in self._waiting:
                self._waiting.remove(request)
                if request.is_paused and self.connector is not None:
                    self.connector.request_ended_paused(request)
                complete(request, "cancelled")
            else:
                self._ends.cut_short(request, "cancelled")
                if request.state is LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS:
                    # TensorRT-LLM handles cancels behind a forward and polls: none runs before the save is begun.
                    self._ends.poll_transfers()
            return True

    def pause(self, request: LlmRequest) -> None:
        """Takes a running request's blocks away and has it computed anew later (V2). Others are left as they are."""
        with self._guarded():
            is_parked = self.connector is not None and self.connector.is_loading(request.request_id)
            if request.request_id in self._active and not is_parked:
                self._pause(request)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._waiting) + sum(not request.is_finished for request in self._active.values())

    @property
    def pending_transfers(self) -> list[int]:
        """Ids of requests whose KV the connector is loading or saving."""
        return [] if self.connector is None else self.connector.pending_transfers

    # -- the loop -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one iteration; True when a forward ran, False when there was nothing to run.

        A request that fails ends with finish reason "error", and so do all running ones where their forward fails and
        the contract's version survives that, or where it is interrupted, which is raised. Any other error ends all
        requests and the engine, and is raised.
        """
        with self._guarded():
            ran = self._iterate()
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt
        return ran

    def poll_transfers(self) -> None:
        """An idle iteration: asks the connector which transfers have ended."""
        with self._guarded():
            self._ends.poll_transfers()

    def shutdown(self) -> None:
        """Aborts what is left and closes the connector. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                for request in [*self._waiting, *self._active.values()]:
                    self.abort(request)
            finally:
                self._failure = self._failure or "it was shut down"
                if self.connector is not None:
                    self.connector.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time; whatever is raised inside ends the engine."""
        with self._lock:
            self._check_alive()
            try:
                yield
            except BaseException as error:
                self._fail(error)
                raise

    def _iterate(self) -> bool:
        batch = self._scheduler.schedule(self._active.values(), self._waiting, self.block_manager)
        for request in batch.admitted:
            self._active[request.request_id] = request
        self._preparation.prepare(batch)
        if self.connector is not None:
            self.connector.build_scheduler_output(batch, self.block_manager.block_ids)
        stream = self._stream()
        if len(batch):
            self._start_batch(batch, stream)
        ran = len(batch) > 0 or len(self._results) > 0
        if not len(batch):
            self._results.take()
        elif (logits := self._forward(batch, stream)) is not None:
            self._update(batch, logits)
        self._ends.poll_transfers()
        return ran

    def _start_batch(self, batch: ScheduledBatch, stream: torch.cuda.Stream | None) -> None:
        if self.connector is not None:
            self.connector.take_scheduled_requests_pending_load(batch)
            self.connector.handle_metadata()
            self.connector.start_load_kv(stream)

    def _forward(self, batch: ScheduledBatch, stream: torch.cuda.Stream | None) -> torch.Tensor | None:
        """Returns logits, float32 [requests, vocabulary], of each request's last row; None when the forward failed and
        all running requests have ended with it."""
        error: Exception
        try:
            return self._run(batch, stream)
        except KeyboardInterrupt as interrupt:
            self._interrupt, error = interrupt, SemBlendError("it was interrupted")
        except Exception as failure:
            if not self._version.survives_failed_forward:
                raise
            logger.exception("a forward failed; the running requests end")
            error = failure
        self._results.clear()
        self._ends.fail_running(error)
        return None

    def _run(self, batch: ScheduledBatch, stream: torch.cuda.Stream | None) -> torch.Tensor:
        if self.connector is not None and self.llm_args.layer_hooks and self.connector.uses_layer_hooks:
            self.model_runner.before_layer = partial(self.connector.layer_pre_hook, stream=stream)
            self.model_runner.after_layer = partial(self.connector.layer_post_hook, stream=stream)
        with self.pool.computing():
            logits = self.model_runner.forward([self._slice(request) for request in batch.requests])
        if self.connector is not None:
            self.connector.after_forward(stream)
        return logits

    def _slice(self, request: LlmRequest) -> SequenceSlice:
        block_ids = tuple(self.block_manager.block_ids(request.request_id))
        if request.state is not LlmRequestState.CONTEXT_INIT:
            position, token = request.next_row()
            return SequenceSlice(request.request_id, position, (token,), block_ids)
        begin, end = request.context_current_position, request.context_current_position + request.context_chunk_size
        return SequenceSlice(request.request_id, begin, tuple(request.tokens(begin, end)), block_ids)

    def _update(self, batch: ScheduledBatch, logits: torch.Tensor) -> None:
        """Moves every request of the batch on: positions, new tokens, ends, and publication of the prompts' blocks.

        With the overlap scheduler the tokens handled are those of the iteration before: a request that ended with them
        has been in this batch for nothing.
        """
        if not self.llm_args.disable_overlap_scheduler:
            self._results.take()
        rows = BatchLogits(logits)
        for row, request in enumerate(batch.requests):
            if request.is_finished:
                continue
            if request.state is LlmRequestState.CONTEXT_INIT:
                request.context_current_position += request.context_chunk_size
                if request.context_remaining_length:
                    continue
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
            self._results.sample(request, rows, row)
        if self.llm_args.disable_overlap_scheduler:
            self._results.take()
        for request in batch.context_requests:
            if not request.is_finished:
                written = min(request.context_current_position, request.prompt_len - 1)
                self.block_manager.publish(request.request_id, request.tokens(0, written))

    def _pause(self, request: LlmRequest) -> None:
        """Puts a running request back among the waiting ones, unless the token it waits for ends it."""
        self._results.accept(request)
        if request.is_finished:
            return
        del self._active[request.request_id]
        self.block_manager.release(request.request_id)
        request.pause()
        if self.connector is not None:
            self.connector.reset_request_state(request.request_id)
        self._waiting.appendleft(request)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        for request in [*self._waiting, *self._active.values()]:
            if not request.is_finished:
                request.error = f"the engine stopped: {self._failure}"
                complete(request, "error")
            self.block_manager.release(request.request_id)
        self._waiting.clear()
        self._active.clear()
        self._results.clear()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise SemBlendError(f"this engine has stopped ({self._failure}); build a new one")

    def _stream(self) -> torch.cuda.Stream | None:
        device = self.model_runner.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None


class RequestEnds:
    """Ends the requests of `active` as the contract's version does, and lets go of what the connector has saved.

    A request that is saved keeps its blocks until the save has ended, or only what the reuse tree has of them: which,
    the version says. `prompts_only`: generated tokens are not published (V2).
    """

    def __init__(
        self,
        llm_args: LlmArgs,
        active: dict[int, LlmRequest],
        blocks: BlockManager,
        connector: KvCacheConnectorManager | None,
        *,
        prompts_only: bool,
    ) -> None:
        self._version = contract_version(llm_args.contract)
        self._pins_saved = self._version.pins_with_transceiver or llm_args.cache_transceiver_config is None
        self._active, self._blocks, self._connector = active, blocks, connector
        self._prompts_only = prompts_only

    def finish(self, request: LlmRequest, reason: str, *, publish: bool) -> None:
        """Ends a running request: with `publish` its blocks are offered for reuse; then they are freed or saved."""
        request_id = request.request_id
        request.finish_reason = reason
        del self._active[request_id]
        if publish:
            written = request.num_written_tokens
            end = min(written, request.prompt_len) if self._prompts_only else written
            self._blocks.publish(request_id, request.tokens(0, end))
        if not self._tell(request, reason):
            self._blocks.release(request_id)
            complete(request, reason)
            return
        request.state = LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        if self._version.holds_saved_blocks:
            self._blocks.stop_growing(request_id)
        elif self._pins_saved:
            self._blocks.pin(request_id)
        else:
            self._blocks.release(request_id)

    def cut_short(self, request: LlmRequest, reason: str) -> None:
        """Ends a running request before its time; one whose load is under way, as soon as the connector reports it,
        where the version waits for that."""
        connector = self._connector
        if connector is not None and self._version.defers_cancel and connector.is_loading(request.request_id):
            request.finish_reason = reason
        else:
            self.finish(request, reason, publish=False)

    def fail_running(self, error: Exception) -> None:
        """Ends all running requests because of an error in their forward; those that wait are left alone."""
        for request in list(self._active.values()):
            if not request.is_finished:
                request.error = f"request {request.request_id} ran in a forward that failed: {error}"
                self.cut_short(request, "error")

    def poll_transfers(self) -> None:
        """Asks the connector which transfers have ended, and lets go of what they held."""
        if self._connector is None:
            return
        saved, loaded = self._connector.get_finished()
        self._let_go(saved)
        for request in loaded:
            if request.finish_reason is not None and request.request_id in self._active:
                self.finish(request, request.finish_reason, publish=False)

    def _tell(self, request: LlmRequest, reason: str) -> bool:
        """Tells the connector that the request has ended; True when it saves from the request's blocks."""
        if self._connector is None:
            return False
        is_whole = reason in ("length", "stop")
        tell = self._connector.request_finished if is_whole else self._connector.request_cut_short
        return tell(request, self._blocks.block_ids(request.request_id))

    def _let_go(self, saved: Iterable[LlmRequest]) -> None:
        for index, request in enumerate(saved):
            if self._version.holds_saved_blocks:
                self._blocks.release(request.request_id)
            elif index == 0 or self._version.unpins_every_save:
                self._blocks.unpin(request.request_id)
            request.state = LlmRequestState.GENERATION_COMPLETE


def complete(request: LlmRequest, reason: str) -> None:
    """Marks a request that holds nothing any more as ended."""
    request.finish_reason = reason
    request.state = LlmRequestState.GENERATION_COMPLETE


class Finish(Protocol):
    """Ends a running request."""

    def __call__(self, request: LlmRequest, reason: str, *, publish: bool) -> None: ...


class TokenResults:
    """Samples tokens and hands them to their requests when `take` is called; `finish` ends requests."""

    def __init__(
        self, eos_token_ids: Collection[int], connector: KvCacheConnectorManager | None, finish: Finish
    ) -> None:
        self._sampler = Sampler()
        self._eos_token_ids = eos_token_ids
        self._connector = connector
        self._finish = finish
        self._unread: list[LlmRequest] = []

    def __len__(self) -> int:
        """Requests whose newest token is not handled."""
        return len(self._unread)

    def generator(self, params: SamplingParams) -> torch.Generator | None:
        """The random numbers of one request; None where it needs none."""
        return self._sampler.generator(params)

    def sample(self, request: LlmRequest, logits: BatchLogits, row: int) -> None:
        """Chooses the request's next token from its row of `logits`. A request for which that fails ends."""
        try:
            request.pending_token = next_token(request, logits, row, self._sampler)
        except Exception as error:
            logger.exception("request %d failed", request.request_id)
            request.error = f"request {request.request_id} failed while its next token was chosen: {error}"
            self._finish(request, "error", publish=False)
            return
        self._unread.append(request)

    def take(self) -> None:
        """Handles the tokens sampled since the last call."""
        unread, self._unread = self._unread, []
        for request in unread:
            self.accept(request)

    def accept(self, request: LlmRequest) -> None:
        """Handles the request's newest token, if there is one; that may end the request."""
        token = request.pending_token
        if token is None or request.is_finished:
            return
        request.pending_token = None
        request.add_new_token(token)
        if request.first_token_time is None:
            request.first_token_time = perf_counter()
            if self._connector is not None:
                request.reuse_report = self._connector.reuse_of(request.request_id)
        reason = finish_reason(request, token, self._eos_token_ids)
        if reason is not None:
            self._finish(request, reason, publish=True)

    def clear(self) -> None:
        self._unread.clear()


def max_seq_len(args: LlmArgs, context: int) -> int:
    """The most tokens of a sequence for a model with `context` positions. Raises ConfigurationError."""
    if args.max_seq_len is not None and args.max_seq_len > context:
        raise ConfigurationError(
            f"max_seq_len {args.max_seq_len} exceeds the model's context of {context} tokens; lower it"
        )
    return args.max_seq_len or context


def check_cache_dtype(asked: str, model_dtype: torch.dtype) -> None:
    """Raises ConfigurationError when the pool would have another dtype than the model."""
    if asked not in ("auto", str(model_dtype).removeprefix("torch.")):
        raise ConfigurationError(
            f"kv_cache_config.dtype {asked} differs from the model's {model_dtype}; use auto or load the model in it"
        )


def check_fits(request: LlmRequest, args: LlmArgs, longest: int, blocks: BlockManager) -> None:
    """Raises CapacityError when the request could not run even on an empty engine."""
    total = request.max_total_tokens
    asked = f"a prompt of {request.prompt_len} tokens with {request.max_new_tokens} new ones"
    if total > longest:
        raise CapacityError(f"{asked} exceeds max_seq_len {longest}; shorten the prompt or lower max_tokens")
    if blocks.blocks_for(total) > blocks.num_blocks:
        raise CapacityError(
            f"{asked} needs {blocks.blocks_for(total)} blocks of {blocks.block_size} tokens, the KV pool has "
            f"{blocks.num_blocks}; raise kv_cache_config.max_tokens"
        )
    if not args.enable_chunked_prefill and request.prompt_len > args.max_num_tokens:
        raise CapacityError(
            f"{asked} exceeds the {args.max_num_tokens} rows of max_num_tokens; raise it or enable chunked prefill"
        )
