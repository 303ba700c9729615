"""Attaches to TensorRT-LLM's executor: a guard on its cache manager, and plan execution in its decoder if possible.

Facts: NVIDIA/TensorRT-LLM, `_torch/pyexecutor/model_engine.py` (1.1 to 1.3: the engine holds its graph runner) and
`_torch/pyexecutor/engine/runners/decoder/runner.py` (main: the engine holds a runner that holds it);
`_torch/modules/attention.py` (main: `_torch/attention/attention.py`); `TrtllmAttention` of
`_torch/attention_backend/trtllm.py` (1.1 to 1.3) and of `_torch/attention/backends/trtllm.py` (main): the scales by
which KV is stored in e4m3, of each layer one for K and V alike, are `kv_scale_quant_orig`, 1 unless something sets it,
and its inverse `kv_scale_orig_quant`; `cpp/tensorrt_llm/kernels/unfusedAttentionKernels/
unfusedAttentionKernels_2_template.h`: K and V are multiplied by the latter before they are stored.
"""

from __future__ import annotations

import inspect
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine_wrapper.kv_scales import scale_of
from engine_wrapper.self_check import LayoutError
from engine_wrapper.trtllm.hooks import find_executor, held_by, watch_weights
from engine_wrapper.trtllm.manager_guard import ManagerGuard, guard_for, guard_refusal
from engine_wrapper.trtllm.planned_forward import PlannedForward
from semblend_trt.connector.eligibility import decoder_refusal, rotates_otherwise
from semblend_trt.connector.pool_geometry import needs_scales
from semblend_trt.connector.weights import Weights
from semblend_trt.outcome import Scope, advice

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine_wrapper.patches import Undo
    from engine_wrapper.trtllm.hooks import ExecutorParts
    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

Change = TypeVar("Change", ManagerGuard, PlannedForward)

_NORMAL_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Attachment:
    """What was attached. `guard_refusal` and `execution_refusal` say why something was not.

    Without a guard nothing is attached. `forward` executes plans once its self-check has passed.
    """

    guard: ManagerGuard | None
    forward: PlannedForward | None
    guard_refusal: str | None = None
    execution_refusal: str | None = None
    unwatch: Undo = lambda: None

    def remove(self) -> None:
        """Leaves the engine as it was found."""
        for part in (self.forward, self.guard):
            if part is not None:
                part.remove()
        self.unwatch()


def attach_to_executor(
    worker: object, engine: EngineSpec, facts: ModelFacts | None, runtime: Runtime, pool: torch.Tensor
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
        refusal = execution_refusal(parts, engine, facts)
        # Rows would have to be rounded, and attended to, as the engine's own kernels do.
        if refusal is not None or needs_scales(pool):
            return refusal or "kv_cache_dtype"
        return PlannedForward(parts.decoder, parts.manager, runtime, pool, facts, engine.max_num_tokens)

    unwatch = _watch_weights(parts, runtime)
    guarded, reason = _installed(guard, runtime)
    if reason is not None:
        logger.warning(
            "not attached to the engine (%s); only identical text from position 0 is reused. %s",
            reason,
            advice(reason or "", Scope.ATTACHMENT, Scope.DECODER),
        )
        return Attachment(None, None, reason, reason, unwatch)
    runtime.publication_guard = True
    forward, refused = _installed(plans, runtime)
    if refused is not None:
        logger.warning(
            "plans are not executed on this engine (%s); it can only skip what is reused from the left. %s",
            refused,
            advice(refused, Scope.DECODER),
        )
    return Attachment(guarded, forward, None, refused, unwatch)


def _watch_weights(parts: ExecutorParts | None, runtime: Runtime) -> Undo:
    """Watches the model's weights. Without the model nothing shows that weights have changed."""
    if runtime.pool is None:
        return lambda: None
    try:
        assert parts is not None
        model = parts.model_engine.model
        runtime.weights = weights = Weights(model)
        return watch_weights(model, parts.manager, weights)
    except Exception:
        logger.exception("the model's weights cannot be watched")
        return lambda: None


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


def execution_refusal(parts: ExecutorParts, engine: EngineSpec, facts: ModelFacts) -> str | None:
    """Why plans cannot be executed in the engine's decoder, None when they can, as far as is known. Changes nothing."""
    return (
        ("rope_unknown" if rotates_otherwise(facts) else None)
        or decoder_refusal(engine)
        or _refused_executor(parts)
        or _refused_engine(parts.model_engine)
        or _refused_model(parts, facts, engine.ranks)
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
    held = held_by(model_engine)
    if "cuda_graph_runner" in held:
        return model_engine
    runners = [each for each in held.values() if "cuda_graph_runner" in held_by(each)]
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
    if "forward" in held_by(backend):
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


def scales_of(decoder: Any) -> tuple[float, ...]:
    """The scale of each layer of TensorRT-LLM's decoder, None where it is not found; stored KV is multiplied by it when
    it is read.

    Raises LayoutError `kv_scales` where a layer's is not known.
    """
    layers = getattr(decoder, "layers", None)
    if not layers:
        raise LayoutError(
            "kv_scales", f"the engine's decoder, {type(decoder).__name__}, has no layers to read scales of"
        )
    return tuple(_scale_of(getattr(layer, "self_attn", None), index) for index, layer in enumerate(layers))


def _scale_of(attention: Any, index: int) -> float:
    backend, owner = getattr(attention, "attn", None), f"layer {index}"
    read, written = (
        scale_of(getattr(backend, name, None), owner, name) for name in ("kv_scale_quant_orig", "kv_scale_orig_quant")
    )
    if not math.isclose(read * written, 1.0, rel_tol=1e-3):
        raise LayoutError(
            "kv_scales", f"{owner} stores KV times {written!r} and reads it times {read!r}, which is not its inverse"
        )
    return read
