"""Attaches to TensorRT-LLM's executor: a guard on its cache manager, and plan execution in its decoder if possible.

The connector contract hands a worker the pool and nothing else. So the executor that registers its caches is looked for
in the callers' frames; it is the one that holds the worker. Facts: NVIDIA/TensorRT-LLM,
`_torch/pyexecutor/py_executor.py`, `PyExecutor._maybe_init_kv_connector_manager` (1.1 to main);
`_torch/pyexecutor/model_engine.py` (1.1 to 1.3: the engine holds its graph runner) and
`_torch/pyexecutor/engine/runners/decoder/runner.py` (main: the engine holds a runner that holds it);
`_torch/modules/attention.py` (main: `_torch/attention/attention.py`).
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine_wrapper.trtllm.manager_guard import ManagerGuard, guard_for, guard_refusal
from engine_wrapper.trtllm.planned_forward import PlannedForward
from engine_wrapper.watched_call import WatchedCall
from semblend_trt.connector.eligibility import decoder_refusal, rotates_otherwise
from semblend_trt.connector.pool_geometry import needs_scales
from semblend_trt.connector.weights import Weights
from semblend_trt.reasons import Scope, advice

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

Change = TypeVar("Change", ManagerGuard, PlannedForward)

# From the registration up: our own methods, the contract's default forms, and the executor.
_MAX_FRAMES = 16
_NORMAL_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """The parts of a running PyExecutor that can be attached to. `manager` is its KV cache manager."""

    executor: Any
    manager: Any
    model_engine: Any

    @property
    def decoder(self) -> Any:
        """The model without its head; None where the engine or its model is laid out in another way."""
        return getattr(getattr(self.model_engine, "model", None), "model", None)


def find_executor(worker: object) -> ExecutorParts | None:
    """The executor that is registering its caches with `worker`, found among the callers; None when none is."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        # Only what an object itself holds is read: a property of a foreign class could do anything.
        held = _held(frame.f_locals.get("self"))
        if _held(held.get("kv_connector_manager")).get("worker") is worker:
            return ExecutorParts(frame.f_locals["self"], held.get("kv_cache_manager"), held.get("model_engine"))
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _held(owner: Any) -> dict[str, Any]:
    return getattr(owner, "__dict__", None) or {}


@dataclass(frozen=True, slots=True)
class Attachment:
    """What was attached. `guard_refusal` and `execution_refusal` say why something was not.

    Without a guard nothing is attached. `forward` executes plans once its self-check has passed.
    """

    guard: ManagerGuard | None
    forward: PlannedForward | None
    guard_refusal: str | None = None
    execution_refusal: str | None = None
    watched: tuple[WatchedCall, ...] = ()

    def remove(self) -> None:
        """Leaves the engine as it was found."""
        for part in (self.forward, self.guard, *self.watched):
            if part is not None:
                part.remove()


def attach_to_executor(
    worker: object, llm_args: Any, facts: ModelFacts | None, runtime: Runtime, pool: torch.Tensor
) -> Attachment:
    """Attaches to the executor that is registering `pool` with `worker`, on every rank or on none. Never raises.

    The guard alone lets the engine skip reused tokens that follow one another from position 0. Plans with holes, layers
    to compute again or a check need the self-check to pass first. All ranks come here together, because each registers
    its caches at the same point.
    """
    parts = find_executor(worker)

    def guard() -> ManagerGuard | str:
        if runtime.pool is None or facts is None:
            return runtime.refusal or "caches_refused"
        if parts is None:
            return "executor_unknown"
        if getattr(parts.executor, "kv_cache_transceiver", None) is not None:
            return "disaggregated"  # the engine that receives a request's KV would publish it
        return guard_refusal(parts.manager) or guard_for(parts.manager, runtime.active_plans)

    def plans() -> PlannedForward | str:
        assert parts is not None
        assert facts is not None
        refusal = execution_refusal(parts, llm_args, facts)
        # Rows would have to be rounded, and attended to, as the engine's own kernels do.
        if refusal is not None or needs_scales(pool):
            return refusal or "kv_cache_dtype"
        max_rows = getattr(llm_args, "max_num_tokens", None)
        return PlannedForward(parts.decoder, parts.manager, runtime, pool, facts, max_rows)

    watched = () if runtime.pool is None else _watch_weights(parts, runtime)
    guarded, reason = _installed(guard, runtime)
    if guarded is None:
        logger.warning(
            "not attached to the engine (%s); only identical text from position 0 is reused. %s",
            reason,
            advice(reason or "", Scope.ATTACHMENT, Scope.DECODER),
        )
        return Attachment(None, None, reason, reason, watched)
    runtime.publication_guard = True
    forward, refused = _installed(plans, runtime)
    if refused is not None:
        logger.warning(
            "plans are not executed on this engine (%s); it can only skip what is reused from the left. %s",
            refused,
            advice(refused, Scope.DECODER),
        )
    return Attachment(guarded, forward, None, refused, watched)


def _watch_weights(parts: ExecutorParts | None, runtime: Runtime) -> tuple[WatchedCall, ...]:
    """Watch the model's weights, the call that loads others, and the one that empties the reuse tree.

    Without the model nothing shows that weights have changed. Facts: NVIDIA/TensorRT-LLM,
    `llmapi/rlhf_utils.py` (`update_weights` ends in the model's `load_weights`), `resource_manager.py` and
    `kv_cache_manager_v2.py` (`reset_reuse_state`).
    """
    try:
        assert parts is not None
        model = parts.model_engine.model
        runtime.weights = weights = Weights(model)
        calls = (
            [WatchedCall(model, "load_weights", lambda *_: weights.suspect())] if hasattr(model, "load_weights") else []
        )
        if hasattr(parts.manager, "reset_reuse_state"):
            calls.append(WatchedCall(parts.manager, "reset_reuse_state", lambda *_: weights.prefix_cache_reset()))
        return tuple(calls)
    except Exception:
        logger.exception("the model's weights cannot be watched")
        return ()


def _installed(build: Callable[[], Change | str], runtime: Runtime) -> tuple[Change | None, str | None]:
    """What `build` makes, installed on every rank, or the reason why on none. `build` may return this rank's reason."""
    change, reason = None, None
    try:
        made = build()
        if isinstance(made, str):
            reason = made
        else:
            made.install()
            change = made
    except Exception:
        logger.exception("the engine cannot be examined or changed")
        reason = "probe_failed"
    refused = _on_all_ranks(runtime, reason)
    if refused is not None and change is not None:
        change.remove()
    return (change, None) if refused is None else (None, refused)


def _on_all_ranks(runtime: Runtime, reason: str | None) -> str | None:
    """The first reason of any rank: ranks that publish or compute different things must not run together."""
    try:
        return next((each for each in runtime.ranks.gather(reason) if each is not None), None)
    except Exception:
        logger.exception("the ranks could not tell one another what they found")
        return reason or "ranks_unknown"


def execution_refusal(parts: ExecutorParts, llm_args: Any, facts: ModelFacts) -> str | None:
    """Why plans cannot be executed in the engine's decoder, None when they can, as far as is known. Changes nothing."""
    return (
        ("rope_unknown" if rotates_otherwise(facts) else None)
        or decoder_refusal(llm_args)
        or _refused_executor(parts)
        or _refused_engine(parts.model_engine)
        or _refused_model(parts, facts, int(getattr(llm_args, "tensor_parallel_size", None) or 1))
    )


def _refused_executor(parts: ExecutorParts) -> str | None:
    if type(parts.manager).__name__ != "KVCacheManager":
        return "cache_manager_v2"
    if not callable(getattr(parts.manager, "get_batch_cache_indices", None)):
        return "cache_manager_unknown"
    if getattr(parts.executor, "drafter", None) is not None:
        return "speculative_decoding"
    return None


def _refused_engine(model_engine: Any) -> str | None:
    holder = _graph_holder(model_engine)
    if holder is None:
        return "engine_layout"
    runner = getattr(holder, "cuda_graph_runner", None)
    # The runner of prefill graphs is there only when they are on.
    has_prefill_graphs = getattr(holder, "breakable_cuda_graph_runner", None) is not None
    if has_prefill_graphs or (runner is not None and getattr(runner, "enabled", True)):
        return "cuda_graphs"
    compiled = getattr(model_engine, "_torch_compile_enabled", False)
    return "compiled_prefill" if compiled or getattr(holder, "_torch_compile_backend", None) else None


def _graph_holder(model_engine: Any) -> Any:
    """The object that holds the graph runner: the engine up to 1.3, the engine's runner on main; None for others."""
    held = _held(model_engine)
    if "cuda_graph_runner" in held:
        return model_engine
    runners = [each for each in held.values() if "cuda_graph_runner" in _held(each)]
    return runners[0] if len(runners) == 1 else None


def _refused_model(parts: ExecutorParts, facts: ModelFacts, ranks: int) -> str | None:
    decoder = parts.decoder
    layers = getattr(decoder, "layers", None)
    if layers is None or not callable(getattr(decoder, "forward", None)) or len(layers) != facts.num_layers:
        return "model_layout"
    if "forward" in vars(decoder):
        return "model_patched"
    if dict(getattr(parts.manager, "layer_offsets", {})) != {index: index for index in range(facts.num_layers)}:
        return "layer_offsets"
    for index, layer in enumerate(layers):
        # Granite's and OLMo-2's would take hidden rows alone, and TensorRT-LLM has neither.
        if "residual" not in inspect.signature(layer.forward).parameters:
            return "model_layout"
        refusal = _refused_attention(getattr(layer, "self_attn", None), index, facts, ranks)
        if refusal is not None:
            return refusal
    return None


def _refused_attention(attention: Any, index: int, facts: ModelFacts, ranks: int) -> str | None:
    if type(attention).__name__ == "MLA" or hasattr(attention, "kv_lora_rank"):
        return "mla"
    backend = getattr(attention, "attn", None)
    if not callable(getattr(backend, "forward", None)) or getattr(attention, "layer_idx", None) != index:
        return "model_layout"
    if "forward" in _held(backend):
        return "model_patched"
    sizes = tuple(getattr(attention, name, None) for name in ("head_dim", "q_size", "kv_size"))
    # A rank has its share of the heads, and at least one KV head.
    heads, kv_heads = facts.num_heads // ranks, max(1, facts.kv_heads // ranks)
    wanted = (facts.head_dim, heads * facts.head_dim, kv_heads * facts.head_dim)
    if sizes != wanted or not isinstance(getattr(attention, "rope_fusion", None), bool):
        return "model_layout"
    if getattr(attention, "has_quant_scale", False):
        return "quantized_attention"
    if getattr(attention, "attention_chunk_size", None) is not None:
        return "attention_chunks"
    if getattr(attention, "attn_output_gate", None) or not _scales(getattr(attention, "q_scaling", None)):
        return "attention_scaling"
    # Other types also scale cos and sin, which the kernel here does not know.
    rope = facts.rope_parameters.get("rope_type", "default")
    return "rope_fused" if attention.rope_fusion and rope not in _NORMAL_ROPE else None


def _scales(q_scaling: Any) -> bool:
    """Whether scores can be divided by it; None is 1."""
    return q_scaling is None or (isinstance(q_scaling, (int, float)) and 0 < q_scaling < math.inf)
