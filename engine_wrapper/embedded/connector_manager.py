"""Builds a connector, calls it in TensorRT-LLM's order and holds it to a contract: that of 1.2, of 1.4, or our own.

Sources: `KvCacheConnectorManager` of NVIDIA/TensorRT-LLM, under `tensorrt_llm/_torch/pyexecutor/`:
`kv_cache_connector.py` (1.2) and `connectors/kv_cache_connector.py` (main, which becomes 1.4). There is one
rank. Metadata still goes through pickle, as sending it to others needs."""

from __future__ import annotations

import importlib
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.contract import RequestData, ScheduledRequest, SchedulerOutput
from semblend_trt.errors import ConfigurationError, SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from engine_wrapper.embedded.block_manager import KvCacheLayout
    from engine_wrapper.embedded.llm_args import LlmArgs
    from engine_wrapper.embedded.request import LlmRequest, ScheduledBatch


def _require(holds: bool, broken: str) -> None:
    """Raise SemBlendError if the connector broke its contract: the engine cannot go on."""
    if not holds:
        raise SemBlendError(f"the connector broke its contract: {broken}")


class KvCacheConnectorManager:
    """One connector: its `scheduler` decides; its `worker` moves KV. The engine's arguments name the contract."""

    def __init__(self, worker: Any, scheduler: Any, llm_args: LlmArgs) -> None:
        self.worker, self.scheduler = worker, scheduler
        self._is_v2, self._is_own, self._is_12 = llm_args.is_v2, llm_args.is_own, llm_args.contract == "1.2"
        # How many tokens and blocks of a request the connector knows.
        self._reported: dict[int, tuple[int, int]] = {}
        self._synchronous_loads: dict[int, int] = {}
        # Requests that are saved, and those of them that `get_finished` has not named yet.
        self.saving: dict[int, LlmRequest] = {}
        self._unnamed: list[int] = []
        self._forward_pass_callable: Callable[[], None] | None = None

    def register(self, pool: torch.Tensor, layout: KvCacheLayout | None = None) -> None:
        """Register the pool, by its `layout` under V2, and finish initialisation. Call once, before any request."""
        self._forward_pass_callable = self.worker.register_forward_pass_callable()
        if layout is None:
            self.worker.register_kv_caches(pool)
        else:
            self.worker.register_kv_cache_layout(layout)
        if not self._is_12:
            self.scheduler.wait_for_initialization()

    # -- a new request --------------------------------------------------------------------------------------------

    def ask(self, request: LlmRequest, num_computed_tokens: int, room: int) -> int:
        """Ask for tokens beyond `num_computed_tokens` from the connector; return how many the engine takes.

        It takes at most `room`, and never the prompt's last one; V1 takes all or refuses. All are loaded before the
        next forward."""
        left = request.prompt_len - 1 - num_computed_tokens
        handed: Any = request.bound() if self._is_12 else request
        matched, asynchronous = answer = self.scheduler.get_num_new_matched_tokens(handed, num_computed_tokens)
        fits = matched >= 0 and (self._is_v2 or matched <= left)
        _require(fits and not asynchronous, f"of {left} tokens request {request.request_id} was offered {answer!r}")
        if taken := min(matched, left, room):
            self._synchronous_loads[request.request_id] = taken
        return int(taken)

    def update_state_after_alloc(self, request: LlmRequest, block_ids: Sequence[int]) -> None:
        """Report to the scheduler which blocks the request has."""
        self._call("update_state_after_alloc", request, block_ids)

    def forget(self, request_id: int) -> None:
        """Drop an ended or a paused request: a paused one is asked about and described in full again."""
        self._reported.pop(request_id, None)
        self._synchronous_loads.pop(request_id, None)

    # -- an iteration ---------------------------------------------------------------------------------------------

    def handle_metadata(self, batch: ScheduledBatch, block_ids_of: Callable[[int], list[int]]) -> None:
        """Describe the batch to the scheduler: new requests in full, known ones as deltas. Bind a pickled copy of the
        metadata that it builds, as every rank gets one."""
        output: Any = SimpleNamespace(new_requests=[], cached_requests=[]) if self._is_12 else SchedulerOutput()
        for request in batch.requests:
            known = request.request_id in self._reported
            data = self._request_data(request, block_ids_of(request.request_id))
            (output.cached_requests if known else output.new_requests).append(data)
        self._synchronous_loads.clear()
        self.worker.bind_connector_meta(pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output))))

    def after_forward(self, stream: torch.cuda.Stream | None) -> None:
        if self._forward_pass_callable is not None:
            self._forward_pass_callable()
        self.worker.wait_for_save(stream)

    # -- the end of a request -------------------------------------------------------------------------------------

    def request_finished(self, request: LlmRequest, block_ids: Sequence[int], *, is_late: bool = False) -> bool:
        """Report the end, but in some versions not of a request cut short; True to hold its blocks for a save.

        With `is_late` it is reported in any case: the request has ended before this iteration."""
        self.forget(request.request_id)
        if request.was_cut_short and not self._is_own and not is_late:
            return False
        saving = self._call("request_finished", request, block_ids)
        _require(bool(block_ids) or not saving, f"request {request.request_id} has no blocks, and is saved")
        if saving:
            self.saving[request.request_id] = request
            self._unnamed.append(request.request_id)
        return bool(saving)

    def get_finished(self) -> list[LlmRequest]:
        """Hand in new saves; return the requests that are saved. The executor calls it in idle iterations too."""
        named, self._unnamed = self._unnamed, []
        saved_ids, loaded_ids = self.worker.get_finished(named, [])
        is_known = not loaded_ids and len(set(saved_ids)) == len(saved_ids) and self.saving.keys() >= set(saved_ids)
        _require(is_known, f"{saved_ids!r} were reported as saved, {loaded_ids!r} as loaded")
        return [self.saving.pop(request_id) for request_id in saved_ids]

    def reuse_of(self, request_id: int) -> Any:
        """Return the connector's report on a request's reuse; None where it offers none."""
        return getattr(self.scheduler, "reuse_of", lambda _: None)(request_id)

    def close(self) -> None:
        """Close scheduler and worker where they can be closed."""
        for part in (self.scheduler, self.worker):
            getattr(part, "close", lambda: None)()

    def _call(self, name: str, request: LlmRequest, block_ids: Sequence[int]) -> Any:
        """Call the scheduler with a request's blocks, by layer group under V2."""
        if self._is_v2:
            return getattr(self.scheduler, f"{name}_by_layer_group")(request, [list(block_ids)])
        return getattr(self.scheduler, name)(request, list(block_ids))

    def _request_data(self, request: LlmRequest, block_ids: list[int]) -> ScheduledRequest:
        known_tokens, known_blocks = self._reported.get(request.request_id, (0, 0))
        num_tokens = len(request.all_tokens)
        self._reported[request.request_id] = num_tokens, len(block_ids)
        position = request.context_current_position if request.is_in_context else num_tokens - 1
        data = (
            request.request_id,
            request.all_tokens[known_tokens:],
            block_ids[known_blocks:],
            # A synchronous load has not run yet: the position is that of its first token.
            position - self._synchronous_loads.get(request.request_id, 0),
            request.context_chunk_size if request.is_in_context else 1,
        )
        if self._is_12:
            return ScheduledRequest(*data)
        groups = [block_ids[known_blocks:]] if self._is_v2 else []
        return RequestData(*data, cache_salt=request.cache_salt, new_block_ids_by_layer_group=groups)


# What TensorRT-LLM's own classes declare as abstract.
_SCHEDULER_CALLS = "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished"
_FORWARD_CALLS = "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"
_WORKER_CALLS = "register_kv_caches", *_FORWARD_CALLS, "get_finished"


def load_connector(llm_args: LlmArgs) -> KvCacheConnectorManager | None:
    """Import and build the classes that KvCacheConnectorConfig names; None without that configuration.

    Each gets one positional argument, `llm_args`, as in TensorRT-LLM. Raises ConfigurationError when the module or a
    class is missing or lacks a method of the contract. What a constructor itself raises is passed on."""
    if (config := llm_args.kv_connector_config) is None:
        return None
    try:
        module = importlib.import_module(config.connector_module)
    except ImportError as error:
        raise ConfigurationError(
            f"connector_module {config.connector_module} cannot be imported: {error}; check the name and the path"
        ) from error
    halves, names = [], (config.connector_scheduler_class, config.connector_worker_class)
    for name, calls in zip(names, (_SCHEDULER_CALLS, _WORKER_CALLS), strict=True):
        found = getattr(module, name, None)
        if not isinstance(found, type):
            raise ConfigurationError(f"connector_module {module.__name__} has no class {name}; check the name")
        if missing := [each for each in calls if not callable(getattr(found, each, None))]:
            raise ConfigurationError(
                f"connector class {module.__name__}.{name} lacks {', '.join(missing)}; the contract requires it"
            )
        halves.append(found)
    scheduler, worker = halves
    return KvCacheConnectorManager(worker(llm_args), scheduler(llm_args), llm_args)
