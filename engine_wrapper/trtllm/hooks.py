"""Changes TensorRT-LLM's objects, and is the one place that looks for its executor.

`docs/attach.md` lists the changes. Each change has a function here. To undo it, call what the function returns. If a
method is changed already, it is refused (`engine_wrapper.patches`).

Facts: NVIDIA/TensorRT-LLM, `_torch/pyexecutor/py_executor.py`, `PyExecutor._maybe_init_kv_connector_manager` (1.1 to
main); `llmapi/rlhf_utils.py` (`update_weights` ends in the model's `load_weights`); `resource_manager.py` and
`kv_cache_manager_v2.py` (`reset_reuse_state`); `_torch/models/modeling_qwen.py`, `modeling_qwen3.py` and
`modeling_llama.py`: a layer's `self_attn.attn`, which is no module, has `forward(q, k, v, metadata, ...)`."""

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
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
