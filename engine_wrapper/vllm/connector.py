"""SemBlendConnector: the connector as vLLM loads it, one object for each of its two roles.

Facts: vLLM, `distributed/kv_transfer/kv_connector/v1/base.py` (0.28 to 0.32)."""

from __future__ import annotations

import logging
from copy import copy, deepcopy
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from engine_wrapper.vllm.engine_spec import from_vllm_config
from engine_wrapper.vllm.refusals import are_workers_apart, engine_refusal_of
from engine_wrapper.vllm.stats import ReuseMetrics, ReuseStats
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    import torch

    from engine_wrapper.vllm.scheduler import StepMetadata


class _IntoVllm(logging.Handler):
    """Brings each line, once, into vLLM's own log, with its level and time, and `semblend` before the message."""

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger("vllm")
        handlers = target.handlers
        if not handlers and not logging.getLogger().handlers and logging.lastResort is not None:
            handlers = [logging.lastResort]  # vLLM configures no logging, and the user neither
        own = copy(record)
        own.msg = f"semblend: {record.msg}"
        for handler in handlers if target.isEnabledFor(record.levelno) else ():
            if record.levelno >= handler.level:
                handler.handle(own)


_log = _IntoVllm()


def _of(path: str) -> Any:
    """A method of vLLM's connectors that is one of a half, at this path of the connector."""
    return property(attrgetter(path))


class SemBlendConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Serves requests from other requests' KV (see `docs/vllm.md`). What is refused is served as stock."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        for floor in ("engine_wrapper", "semblend_trt", "kernels"):
            logger = logging.getLogger(floor)
            logger.addHandler(_log)  # a handler is added once
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)
        arguments = from_vllm_config(vllm_config)
        self._runtime = runtime_for(arguments)
        refusal = arguments.refusal or engine_refusal_of(vllm_config, kv_cache_config)
        self._runtime.refusal = self._runtime.refusal or refusal
        # Each role has its half, and vLLM calls only its methods. Other processes import this class and need neither.
        if role is KVConnectorRole.SCHEDULER:
            from engine_wrapper.vllm.scheduler import VllmScheduler

            self._scheduler = VllmScheduler(arguments, is_apart=are_workers_apart(vllm_config))
        else:
            from engine_wrapper.vllm.worker import VllmWorker

            self._worker = VllmWorker(arguments, vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is a donor less."""
        return False

    # The scheduler's role.
    bind_gpu_block_pool = _of("_scheduler.bind_gpu_block_pool")
    set_xfer_handshake_metadata = _of("_scheduler.learn_start")
    get_num_new_matched_tokens = _of("_scheduler.get_num_new_matched_tokens")
    update_state_after_alloc = _of("_scheduler.update_state_after_alloc")
    build_connector_meta = _of("_scheduler.build_connector_meta")
    request_finished = _of("_scheduler.request_finished")
    reset_cache = _of("_scheduler.reset_cache")
    update_connector_output = _of("_scheduler.update_connector_output")

    # The worker's role.
    get_handshake_metadata = _of("_worker.start_report")
    build_connector_worker_meta = _of("_worker.step_report")
    get_block_ids_with_load_errors = _of("_worker.recovery.take_failed_blocks")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, unless another connector (MultiConnector) hands them on: each sees a part of a step."""
        if not (has_kv_transfer_group() and get_kv_transfer_group() is self):
            self._runtime.refusal = self._runtime.refusal or "other_connector"
        self._worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin the step: vLLM 0.32 calls `start_load_kv` after the forward if no load was promised."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.start_load_kv(self._step)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Do nothing: `bind_connector_metadata` begins the step."""

    def has_connector_metadata(self) -> bool:
        """False: vLLM then calls neither of the two methods below."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are ordered before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: KV is saved when its request has finished."""

    def wait_for_save(self) -> None:
        self._worker.wait_for_save(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002 - the step names them
        return self._worker.get_finished(self._step), None

    # Both roles.

    def get_kv_connector_stats(self) -> ReuseStats | None:
        return None if self.role is KVConnectorRole.WORKER else self._scheduler.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ReuseStats:
        return ReuseStats(deepcopy(data or {}))

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **options: Any) -> ReuseMetrics:
        return ReuseMetrics(*arguments, **options)

    def shutdown(self) -> None:
        """Close this half. vLLM calls it in the worker's role, and in some versions in the scheduler's."""
        half = self._worker if self.role is KVConnectorRole.WORKER else self._scheduler
        half.close()

    @property
    def _step(self) -> StepMetadata:
        return self._worker.step_of(self._connector_metadata)
