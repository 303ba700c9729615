"""The connector's worker half, on every rank: places donors' KV before the forward, keeps finished requests' KV after.

It takes no decision: plans, drops and save intents arrive in the metadata, so that all ranks do the same.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.connector.contract import KvCacheConnectorWorker
from semblend_trt.connector.metadata import RequestProgress, SemBlendConnectorMetadata
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.connector.saver import DonorSaver
from semblend_trt.donors.tiers import HostTier
from semblend_trt.errors import UnsupportedModelError
from semblend_trt.materialize import materialize
from semblend_trt.runtime import EngineMode, PoolFacts, runtime_for

if TYPE_CHECKING:
    from semblend_trt.connector.metadata import SaveIntent
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.plan import SemanticKvPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _FollowedRequest:
    """Blocks and written tokens of a running request that may become a donor."""

    intent: SaveIntent
    block_ids: list[int] = field(default_factory=list)
    written_tokens: int = 0


class SemBlendKvConnectorWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """Loads are complete and ordered on the given stream when `start_load_kv` returns; the layer hooks do nothing,
    because CUDA-graph replay skips them."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._runtime = runtime_for(llm_args)
        self._settings = load_settings()
        self._facts: ModelFacts | None = None
        self._pool: torch.Tensor | None = None
        self._geometry: KvGeometry | None = None
        self._saver: DonorSaver | None = None
        self._followed: dict[int, _FollowedRequest] = {}
        self.tier = HostTier(self._settings.host_bytes, pin=torch.cuda.is_available())
        try:
            self._facts = model_facts(llm_args.model)
        except UnsupportedModelError as error:
            self._runtime.refusal = error.reason
        except Exception:
            logger.exception("KV reuse is off: the model's configuration cannot be read")
            self._runtime.refusal = "model_unreadable"

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Takes the pool, [blocks, layers, 2, kv_heads * block_size * head_dim]; refuses any other layout by name."""
        if self._facts is None:
            return
        geometry = _geometry_of(kv_cache_tensor, self._facts, int(getattr(self._llm_args, "tensor_parallel_size", 1)))
        if geometry is None:
            logger.warning(
                "KV reuse is off: a pool of shape %s and dtype %s does not fit the model",
                list(kv_cache_tensor.shape),
                kv_cache_tensor.dtype,
            )
            self._runtime.refusal = "pool_layout"
            return
        self._pool, self._geometry = kv_cache_tensor, geometry
        self._saver = DonorSaver(self.tier, geometry, self._facts.rotation)
        self._runtime.pool = PoolFacts(geometry, kv_cache_tensor.shape[0], kv_cache_tensor.dtype)

    def start_load_kv(self, stream: torch.cuda.Stream | None) -> None:
        """Applies the bound metadata: drops donors, follows blocks, and places every plan's spans on `stream`."""
        metadata = self.get_connector_meta()
        if not isinstance(metadata, SemBlendConnectorMetadata):
            return
        for donor_id in metadata.drops:
            self.tier.drop(donor_id)
        for request_id in metadata.forgotten:
            self._followed.pop(request_id, None)
            self._runtime.active_plans.discard(request_id)
        for intent in metadata.intents:
            self._followed[intent.request_id] = _FollowedRequest(intent)
        for progress in metadata.progress:
            self._follow(progress)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for plan in metadata.plans:
                self._load(plan)

    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        """Nothing to wait for: `start_load_kv` ordered every layer before the forward."""

    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        """Nothing to do: KV is saved when its request has finished."""

    def wait_for_save(self, stream: torch.cuda.Stream | None) -> None:
        """Nothing to wait for: the engine holds the blocks until `get_finished` names the request."""

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Starts saving the requests handed in, returns those whose save has ended. Never blocks."""
        unknown = [request_id for request_id in finished_gen_req_ids if not self._begin_save(request_id)]
        if self._saver is None:
            return unknown, started_loading_req_ids
        ended = self._saver.finished()
        self._runtime.saved.extend(saved for _, saved in ended)
        return unknown + [request_id for request_id, _ in ended], started_loading_req_ids

    def close(self) -> None:
        """Waits for running saves and frees the donors."""
        if self._saver is not None:
            self._saver.close()
        self.tier.clear()

    def _follow(self, progress: RequestProgress) -> None:
        followed = self._followed.get(progress.request_id)
        if followed is None:
            return
        if progress.is_first:
            followed.block_ids.clear()
        followed.block_ids.extend(progress.new_block_ids)
        followed.written_tokens = progress.written_tokens

    def _load(self, plan: SemanticKvPlan) -> None:
        assert self._pool is not None
        assert self._geometry is not None
        assert self._facts is not None
        try:
            materialize(plan, self.tier.get, self._pool, self._geometry, self._facts.rotation)
        except Exception:
            self._runtime.failed_loads.append(plan.request_id)
            if plan.execution.mode is EngineMode.STOCK:
                # The stock engine skips these tokens whatever we do: an error is the only answer that is not wrong.
                raise
            logger.exception("request %d: its donors cannot be placed; the engine computes everything", plan.request_id)
            plan = plan.without_spans("load_failed")
        self._runtime.active_plans.put(plan)

    def _begin_save(self, request_id: int) -> bool:
        followed = self._followed.pop(request_id, None)
        if followed is None or self._saver is None or self._pool is None:
            return False
        tokens = min(followed.written_tokens, followed.intent.max_tokens)
        self._saver.start(request_id, followed.intent.donor_id, self._pool, followed.block_ids, tokens)
        return True


def _geometry_of(pool: torch.Tensor, facts: ModelFacts, tensor_parallel_size: int) -> KvGeometry | None:
    """The geometry for which `pool` is the model's KV pool; None when there is none."""
    kv_heads = max(1, facts.kv_heads // tensor_parallel_size)
    row = kv_heads * facts.head_dim
    if pool.ndim != 4 or tuple(pool.shape[1:3]) != (facts.num_layers, 2) or pool.shape[3] % row:
        return None
    if pool.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    # The engine may override tokens_per_block (FlashMLA does), so the pool is believed rather than the arguments.
    return KvGeometry(facts.num_layers, kv_heads, facts.head_dim, pool.shape[3] // row)
