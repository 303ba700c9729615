"""Attaches to TensorRT-LLM's executor: a guard on its cache manager, and plan execution in its decoder if possible.

Facts: NVIDIA/TensorRT-LLM, `cpp/tensorrt_llm/kernels/unfusedAttentionKernels/unfusedAttentionKernels_2_template.h`: K
and V are multiplied by `kv_scale_orig_quant` before they are stored."""

from __future__ import annotations

import inspect
import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine_wrapper.kv_scales import scales_in
from engine_wrapper.trtllm.hooks import (
    AttentionParts,
    EngineOptions,
    can_fail_requests,
    find_executor,
    has_forward,
    layers_of,
    watch_weights,
)
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
        if EngineOptions(parts).is_disaggregated:
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
    return Attachment(guarded, forward, None, refused, unwatch, parts and parts.executor)


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
    layers, shown = layers_of(parts.decoder), EngineOptions(parts)
    return {
        "manager": type(parts.manager).__name__,
        "attention": type(AttentionParts(layers[0]).backend if layers else None).__name__,
        "graph_holders": [type(each).__name__ for each in shown.graph_holders],
        "decode_graphs": shown.decode_graphs,
        "overlap": shown.overlaps,
        "fails_requests": can_fail_requests(parts.executor),
    }


def _refused_engine(parts: ExecutorParts) -> str | None:
    if table_for(parts.manager) is None:
        return "cache_manager_unknown"
    shown = EngineOptions(parts)
    if shown.has_drafter:
        return "speculative_decoding"
    if shown.reserves_prefixes:
        return "prefix_reservations"
    if len(shown.graph_holders) != 1:
        return "engine_layout"
    # Graphs of decode steps are captured before we attach, and replay no batch with a plan.
    if shown.has_prefill_graphs:
        return "prefill_graphs"
    return "compiled_prefill" if shown.is_compiled else None


def _refused_model(parts: ExecutorParts, facts: ModelFacts, ranks: int) -> str | None:
    layers = layers_of(parts.decoder)
    if layers is None or not has_forward(parts.decoder) or len(layers) != facts.num_layers:
        return "model_layout"
    if "forward" in vars(parts.decoder):
        return "model_patched"
    if parts.layer_offsets != {index: index for index in range(facts.num_layers)}:
        return "layer_offsets"
    for index, layer in enumerate(layers):
        # TensorRT-LLM has no Granite nor OLMo-2, whose layers would take hidden rows alone.
        if "residual" not in inspect.signature(layer.forward).parameters:
            return "model_layout"
        if (refusal := _refused_attention(AttentionParts(layer), index, facts, ranks)) is not None:
            return refusal
    return None


def _refused_attention(attention: AttentionParts, index: int, facts: ModelFacts, ranks: int) -> str | None:
    if attention.is_latent:
        return "mla"
    if not attention.has_forward or attention.layer != index:
        return "model_layout"
    if attention.is_patched:
        return "model_patched"
    wanted = (facts.head_dim, facts.num_heads // ranks * facts.head_dim, facts.sizes(ranks).kv_heads * facts.head_dim)
    if attention.sizes != wanted or not isinstance(attention.fuses_rope, bool):
        return "model_layout"
    if attention.is_quantised:
        return "quantized_attention"
    if attention.chunk is not None:
        return "attention_chunks"
    scaling = attention.scaling
    can_scale = scaling is None or (isinstance(scaling, (int, float)) and 0 < scaling < math.inf)
    if attention.gates_output or not can_scale:
        return "attention_scaling"
    # Other types also scale cos and sin, which the kernel here does not know.
    rope = facts.rope_parameters.get("rope_type", "default")
    return "rope_fused" if attention.fuses_rope and rope not in ("default", "linear", "llama3") else None


def scales_of(decoder: Any) -> tuple[float, ...]:
    """Return the scale of each layer of TensorRT-LLM's decoder, by which stored KV is multiplied when it is read.
    Raises LayoutError `kv_scales` for None, a decoder that was not found, and for a scale that is not known."""
    layers, scales = layers_of(decoder), []
    if not layers:
        raise LayoutError(
            "kv_scales", f"the engine's decoder, {type(decoder).__name__}, has no layers to read scales of"
        )
    for index, layer in enumerate(layers):
        attention, owner = AttentionParts(layer), f"layer {index}"
        names = ("kv_scale_quant_orig", "kv_scale_orig_quant")
        read, written = (scales_in(attention.scale(name), owner, name, heads=1)[0] for name in names)
        if not math.isclose(read * written, 1.0, rel_tol=1e-3):
            raise LayoutError(
                "kv_scales",
                f"{owner} stores KV times {written!r} and reads it times {read!r}, which is not its inverse",
            )
        scales.append(read)
    return tuple(scales)
