"""Changes and reads TensorRT-LLM's objects, and is the one place that looks for its executor.

`docs/attach.md` lists the changes. Each change has a function here. To undo it, call what the function returns. If a
method is changed already, it is refused (`engine_wrapper.patches`). What versions hold otherwise is read here alone.

Facts: NVIDIA/TensorRT-LLM, `_torch/pyexecutor/py_executor.py`, `PyExecutor._maybe_init_kv_connector_manager` (1.1 to
main); `_torch/pyexecutor/model_engine.py` (1.1 to 1.3: the engine holds its graph runner) and
`_torch/pyexecutor/engine/runners/decoder/runner.py` (main: the engine holds a runner that holds it);
`llmapi/rlhf_utils.py` (`update_weights` ends in the model's `load_weights`); `resource_manager.py` and
`kv_cache_manager_v2.py` (`reset_reuse_state`); `_torch/models/modeling_qwen.py`, `modeling_qwen3.py` and
`modeling_llama.py`: a layer's `self_attn.attn`, which is no module, has `forward(q, k, v, metadata, ...)`;
`_torch/modules/attention.py` (main: `_torch/attention/attention.py`); `TrtllmAttention` of
`_torch/attention_backend/trtllm.py` (1.1 to 1.3) and of `_torch/attention/backends/trtllm.py` (main): each layer has
one scale for K and V in e4m3, `kv_scale_quant_orig`, 1 unless something sets it, and its inverse `kv_scale_orig_quant`;
pull request 19722 (lending: the V2 manager's `_sharing`)."""

from __future__ import annotations

import inspect
import logging
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_wrapper.patches import replace_method, watch_method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from engine_wrapper.patches import Undo
    from semblend_trt.runtime import Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """The parts of a running PyExecutor that can be attached to. `manager` is its KV cache manager."""

    executor: Any
    manager: Any
    model_engine: Any

    @property
    def decoder(self) -> Any:
        """The model without its head; None if the engine or its model is laid out in another way."""
        return getattr(getattr(self.model_engine, "model", None), "model", None)

    @property
    def layer_offsets(self) -> dict[int, int]:
        """The pool's layer of each of the model's layers."""
        return dict(getattr(self.manager, "layer_offsets", {}))


class EngineOptions:
    """What a running executor shows of its engine's options. `graph_holders` hold a runner of CUDA graphs, and
    `decode_graphs` says whether each runs decode steps as graphs.

    Up to 1.3 the engine holds the graph runner, on main the engine's runner."""

    def __init__(self, parts: ExecutorParts) -> None:
        executor, engine, held = parts.executor, parts.model_engine, held_by(parts.model_engine)
        among = [engine] if "cuda_graph_runner" in held else held.values()
        self.graph_holders = holders = [each for each in among if "cuda_graph_runner" in held_by(each)]
        self.decode_graphs = [bool(getattr(each.cuda_graph_runner, "enabled", None)) for each in holders]
        prefill = [getattr(each, "breakable_cuda_graph_runner", None) for each in holders]
        self.has_prefill_graphs = any(each is not None for each in prefill)
        compiled = [getattr(each, "_torch_compile_backend", None) for each in holders]
        self.is_compiled = any([getattr(engine, "_torch_compile_enabled", False), *compiled])
        self.is_disaggregated = getattr(executor, "kv_cache_transceiver", None) is not None
        self.has_drafter = getattr(executor, "drafter", None) is not None
        self.reserves_prefixes = bool(getattr(executor.kv_connector_manager, "prefix_reservations_enabled", False))
        self.overlaps = not getattr(executor, "disable_overlap_scheduler", False)


class AttentionParts:
    """What the attention module of a layer shows; None for what it lacks.

    `layer`: its own index. `sizes`: channels of a head, of all queries and of all keys. `fuses_rope`: its kernel
    rotates. `scaling`: what 1 / sqrt(head_dim) is divided by."""

    def __init__(self, layer: Any) -> None:
        module = getattr(layer, "self_attn", None)
        self.backend: Any = getattr(module, "attn", None)
        self.has_forward, self.is_patched = has_forward(self.backend), "forward" in held_by(self.backend)
        self.is_latent = type(module).__name__ == "MLA" or hasattr(module, "kv_lora_rank")
        self.layer: Any = getattr(module, "layer_idx", None)
        self.sizes = tuple(getattr(module, name, None) for name in ("head_dim", "q_size", "kv_size"))
        self.fuses_rope: Any = getattr(module, "rope_fusion", None)
        self.is_quantised = bool(getattr(module, "has_quant_scale", False))
        self.chunk: Any = getattr(module, "attention_chunk_size", None)
        self.scaling: Any = scaling_of(module)
        self.gates_output = bool(getattr(module, "attn_output_gate", None))

    def scale(self, name: str) -> Any:
        """Return the scale of stored KV of this name; None if it is missing."""
        return getattr(self.backend, name, None)


def scaling_of(module: Any) -> Any:
    """Return what an attention divides 1 / sqrt(head_dim) by; None for 1."""
    return getattr(module, "q_scaling", None)


def has_forward(owner: Any) -> bool:
    return callable(getattr(owner, "forward", None))


def layers_of(decoder: Any) -> list[Any] | None:
    """Return the decoder's layers; None if it has none."""
    layers = getattr(decoder, "layers", None)
    return None if layers is None else list(layers)


def shown_by(manager: Any, name: str) -> Any:
    """Return what some KV cache managers hold or do by this name; None for others."""
    return getattr(manager, name, None)


def marks_dummies(manager: Any) -> bool:
    """Return whether the request class that the manager's module imports can mark a request as a dummy."""
    module = inspect.unwrap(type(manager).free_resources).__globals__
    return getattr(getattr(module.get("LlmRequest"), "is_dummy_request", None), "fset", None) is not None


def names_in(manager: Any, method: str) -> frozenset[str]:
    """Return attributes and globals that `method` of its class uses; none if Python has no such method."""
    function = inspect.unwrap(getattr(type(manager), method, None))  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


class BatchView:
    """A scheduled batch with some of its context requests left out."""

    def __init__(self, batch: Any, context_requests: list[Any]) -> None:
        self._batch = batch
        self.context_requests = context_requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def option_of(options: Mapping[str, Any], name: str) -> Any:
    """Return an option of an attention's call: by its name, or one of `forward_args` (main); None without it."""
    alone = options.get(name)
    return getattr(options.get("forward_args"), name, None) if alone is None else alone


def find_executor(worker: object) -> ExecutorParts | None:
    """Return the executor that is registering its caches with `worker`, from the callers; None if no caller is it. No
    supported way leads there: the connector's contract hands a worker only the arguments and the pool."""
    frame = sys._getframe(1)
    for _ in range(16):  # our own methods, the contract's default forms, and the executor
        # Only what an object itself holds is read: a property of a foreign class could do anything.
        held = held_by(frame.f_locals.get("self"))
        if held_by(held.get("kv_connector_manager")).get("worker") is worker:
            return ExecutorParts(frame.f_locals["self"], held.get("kv_cache_manager"), held.get("model_engine"))
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def held_by(owner: Any) -> dict[str, Any]:
    """Return the attributes of the object itself, without its class's."""
    return getattr(owner, "__dict__", None) or {}


def guard_publication(manager: Any, guard: Any, names: Sequence[str]) -> Undo:
    """Have the cache manager's methods of these names run the guard's; on all of them, or on none."""
    with ExitStack() as undo:
        for name in names:
            undo.callback(replace_method(manager, name, getattr(guard, name)))
        logger.info("hook: %s publishes exact blocks only", type(manager).__name__)
        return undo.pop_all().close


def watch_weights(model: Any, manager: Any, weights: Weights) -> Undo:
    """Suspect `weights` after a call that loads others, and notice calls that empty the reuse tree."""
    with ExitStack() as undo:
        if hasattr(model, "load_weights"):
            undo.callback(watch_method(model, "load_weights", lambda *_: weights.suspect()))
        if hasattr(manager, "reset_reuse_state"):
            undo.callback(watch_method(manager, "reset_reuse_state", lambda *_: weights.prefix_cache_reset()))
        logger.info("hook: calls that write weights or empty the reuse tree are noticed")
        return undo.pop_all().close


def hook_decoder(decoder: Any, forward: Callable[..., Any]) -> Undo:
    """Replace the decoder's `forward`."""
    undo = replace_method(decoder, "forward", forward)
    logger.info("hook: batches with a plan run our forward")
    return undo


@contextmanager
def hooked_layers(decoder: Any, begin: Callable[..., Any], attend: Callable[..., Any]) -> Iterator[None]:
    """Call `begin` before each layer for a while, and replace each attention backend's `forward`; all or none.

    `begin` gets the layer's index first; `attend` the attention module, the index and the stock method. No forward of
    the engine's own, recorded or not, meets them."""
    with ExitStack() as undo:
        for index, layer in enumerate(decoder.layers):
            undo.callback(layer.register_forward_pre_hook(partial(begin, index), with_kwargs=True).remove)
            attention = layer.self_attn
            own = partial(attend, attention, index, attention.attn.forward)
            undo.callback(replace_method(attention.attn, "forward", own))
        yield


def fail_requests(executor: Any, request_ids: Iterable[int], message: str) -> bool:
    """Have the executor end running requests with an error, as it does if guided decoding fails; False if it cannot.

    Facts: `PyExecutor._handle_errors(error_msg, *, requests)` and `active_requests` (1.2 to main)."""
    if not can_fail_requests(executor):
        return False
    try:
        wanted = set(request_ids)
        found = [each for each in executor.active_requests if each.py_request_id in wanted]
        if len(found) < len(wanted):
            return False
        executor._handle_errors(message, requests=found)
    except Exception:
        logger.exception("the executor could not end requests %s by themselves", request_ids)
        return False
    return True


def can_fail_requests(executor: Any) -> bool:
    """Return whether `fail_requests` finds what it needs."""
    fail = getattr(executor, "_handle_errors", None)
    return callable(fail) and "requests" in inspect.signature(fail).parameters and hasattr(executor, "active_requests")
