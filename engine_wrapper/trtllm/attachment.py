"""Attaches to TensorRT-LLM's executor: a guard on its cache manager, and plan execution in its decoder if possible.

Facts: NVIDIA/TensorRT-LLM, `_torch/pyexecutor/model_engine.py` (1.1 to 1.3: the engine holds its graph runner) and
`_torch/pyexecutor/engine/runners/decoder/runner.py` (main: the engine holds a runner that holds it);
`_torch/modules/attention.py` (main: `_torch/attention/attention.py`); `TrtllmAttention` of
`_torch/attention_backend/trtllm.py` (1.1 to 1.3) and of `_torch/attention/backends/trtllm.py` (main): each layer has
one scale for K and V in e4m3, `kv_scale_quant_orig`, 1 unless something sets it, and its inverse `kv_scale_orig_quant`;
`cpp/tensorrt_llm/kernels/unfusedAttentionKernels/unfusedAttentionKernels_2_template.h`: K and V are multiplied by the
latter before they are stored."""

from __future__ import annotations

import inspect
import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine_wrapper.kv_scales import scales_in
from engine_wrapper.trtllm.hooks import can_fail_requests, find_executor, held_by, watch_weights
from engine_wrapper.trtllm.manager_guard import ManagerGuard, guard_for, guard_refusal
from engine_wrapper.trtllm.planned_forward import PlannedForward, table_for
from semblend_trt.connector.eligibility import decoder_refusal, rotates_otherwise
from semblend_trt.errors import LayoutError
from semblend_trt.pool_facts import needs_scales
from semblend_trt.reasons import Scope, advice
from semblend_trt.runtime import Weights

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


@dataclass(frozen=True, slots=True)
class Attachment:
    """What was attached; without a guard nothing is. The refusals say why something was not. `forward` executes plans
    once its self-check has passed."""

    guard: ManagerGuard | None
    forward: PlannedForward | None
    guard_refusal: str | None = None
    execution_refusal: str | None = None
    unwatch: Undo = lambda: None
    executor: Any = None

    def remove(self) -> None:
        """Leave the engine as it was found."""
        for part in (self.forward, self.guard):
            if part is not None:
                part.remove()
        self.unwatch()


def attach_to_executor(
    worker: object, engine: EngineSpec, facts: ModelFacts | None, runtime: Runtime, pool: torch.Tensor
) -> Attachment:
    """Attach to the executor that is registering `pool` with `worker`, on every rank or on none. Never raises.

    The guard alone lets the engine skip reused tokens that follow one another from position 0. Plans with holes, layers
    to compute again or a check need the self-check first. All ranks call this at the same point."""
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
        table = table_for(parts.manager)
        assert table is not None
        return PlannedForward(parts.decoder, table, runtime, pool, facts, engine.max_num_tokens)

    unwatch = _watch_weights(parts, runtime)
    guarded, reason = _installed(guard, runtime)
    runtime.engine_facts = {"guard_refusal": reason}
    with suppress(Exception):  # an engine that shows other things is attached to without them
        runtime.engine_facts |= {} if parts is None else facts_shown(parts)
    if reason is not None:
        logger.warning(
            "not attached to the engine (%s); only identical text from position 0 is reused. %s",
            reason,
            advice(reason or "", Scope.ATTACHMENT, Scope.DECODER),
        )
        return Attachment(None, None, reason, reason, unwatch)
    runtime.publication_guard = True
    forward, refused = _installed(plans, runtime)
    runtime.engine_facts["execution_refusal"] = refused
    if refused is not None:
        logger.warning(
            "plans are not executed on this engine (%s); it can only skip what is reused from the left. %s",
            refused,
            advice(refused, Scope.DECODER),
        )
    return Attachment(guarded, forward, None, refused, unwatch, getattr(parts, "executor", None))


def _watch_weights(parts: ExecutorParts | None, runtime: Runtime) -> Undo:
    """Watch the model's weights. Without the model nothing shows that weights have changed."""
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
    """Return what `build` makes, installed on every rank, or the first rank's reason why on none: ranks that publish or
    compute different things must not run together. `build` may return this rank's reason."""
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
    try:
        refused = next((each for each in runtime.ranks.gather(reason) if each is not None), None)
    except Exception:
        logger.exception("the ranks could not tell one another what they found")
        refused = reason or "ranks_unknown"
    if refused is not None and change is not None:
        change.remove()
    return (change, None) if refused is None else (None, refused)


def execution_refusal(parts: ExecutorParts, engine: EngineSpec, facts: ModelFacts) -> str | None:
    """Return why plans cannot be executed in the engine's decoder, as far as is known. Changes nothing."""
    return (
        ("rope_unknown" if rotates_otherwise(facts) else None)
        or decoder_refusal(engine)
        or _refused_engine(parts)
        or _refused_model(parts, facts, engine.ranks)
    )


def facts_shown(parts: ExecutorParts) -> dict[str, Any]:
    """Return what the executor shows of the engine's options, so that a first run on a new version shows them."""
    holders, executor = _graph_holders(parts), parts.executor
    layers = list(getattr(parts.decoder, "layers", None) or ())
    attention = getattr(getattr(layers[0], "self_attn", None), "attn", None) if layers else None
    return {
        "manager": type(parts.manager).__name__,
        "attention": type(attention).__name__,
        "graph_holders": [type(each).__name__ for each in holders],
        "decode_graphs": [bool(getattr(each.cuda_graph_runner, "enabled", None)) for each in holders],
        "overlap": not getattr(executor, "disable_overlap_scheduler", False),
        "fails_requests": can_fail_requests(executor),
    }


def _graph_holders(parts: ExecutorParts) -> list[Any]:
    # Up to 1.3 the engine holds the graph runner; on main the engine's runner holds it.
    engine, held = parts.model_engine, held_by(parts.model_engine)
    if "cuda_graph_runner" in held:
        return [engine]
    return [each for each in held.values() if "cuda_graph_runner" in held_by(each)]


def _refused_engine(parts: ExecutorParts) -> str | None:
    if table_for(parts.manager) is None:
        return "cache_manager_unknown"
    if getattr(parts.executor, "drafter", None) is not None:
        return "speculative_decoding"
    if getattr(parts.executor.kv_connector_manager, "prefix_reservations_enabled", False):
        return "prefix_reservations"
    engine, holders = parts.model_engine, _graph_holders(parts)
    if len(holders) != 1:
        return "engine_layout"
    holder = holders[0]
    # Graphs of decode steps are captured before we attach, and replay no batch with a plan.
    if getattr(holder, "breakable_cuda_graph_runner", None) is not None:
        return "prefill_graphs"
    compiled = getattr(engine, "_torch_compile_enabled", False) or getattr(holder, "_torch_compile_backend", None)
    return "compiled_prefill" if compiled else None


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
        # TensorRT-LLM has no Granite nor OLMo-2, whose layers would take hidden rows alone.
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
    wanted = (facts.head_dim, facts.num_heads // ranks * facts.head_dim, facts.sizes(ranks).kv_heads * facts.head_dim)
    if sizes != wanted or not isinstance(getattr(attention, "rope_fusion", None), bool):
        return "model_layout"
    if getattr(attention, "has_quant_scale", False):
        return "quantized_attention"
    if getattr(attention, "attention_chunk_size", None) is not None:
        return "attention_chunks"
    scaling = getattr(attention, "q_scaling", None)
    can_scale = scaling is None or (isinstance(scaling, (int, float)) and 0 < scaling < math.inf)
    if getattr(attention, "attn_output_gate", None) or not can_scale:
        return "attention_scaling"
    # Other types also scale cos and sin, which the kernel here does not know.
    rope = facts.rope_parameters.get("rope_type", "default")
    return "rope_fused" if attention.rope_fusion and rope not in ("default", "linear", "llama3") else None


def scales_of(decoder: Any) -> tuple[float, ...]:
    """Return the scale of each layer of TensorRT-LLM's decoder, by which stored KV is multiplied when it is read.
    Raises LayoutError `kv_scales` for None, a decoder that was not found, and for a scale that is not known."""
    layers, scales = getattr(decoder, "layers", None), []
    if not layers:
        raise LayoutError(
            "kv_scales", f"the engine's decoder, {type(decoder).__name__}, has no layers to read scales of"
        )
    for index, layer in enumerate(layers):
        backend, owner = getattr(getattr(layer, "self_attn", None), "attn", None), f"layer {index}"
        names = ("kv_scale_quant_orig", "kv_scale_orig_quant")
        read, written = (scales_in(getattr(backend, name, None), owner, name, heads=1)[0] for name in names)
        if not math.isclose(read * written, 1.0, rel_tol=1e-3):
            raise LayoutError(
                "kv_scales",
                f"{owner} stores KV times {written!r} and reads it times {read!r}, which is not its inverse",
            )
        scales.append(read)
    return tuple(scales)
