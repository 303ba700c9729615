"""Every change of vLLM's objects, and the one place that looks for those that vLLM does not hand over.

`docs/vllm.md` lists the changes. Each has a function here; what it returns, or the end of its context, undoes it. A
method that is changed already is refused (`engine_wrapper.patches`). Changes of one step tell of themselves once.

Facts: vLLM (0.25.1 to 0.32), `v1/core/block_pool.py` (`cache_full_blocks`, `cache_partial_block`, and
`reset_prefix_cache`), `v1/core/sched/scheduler.py`, `v1/executor/uniproc_executor.py` (`collective_rpc`, by which all
runs in the worker, also `reload_weights`, `update_weights`, `wake_up`, `apply_model` and a user's own functions),
`v1/worker/gpu_model_runner.py` (V1) and `v1/worker/gpu/model_runner.py` (V2), `forward_context.py`.
"""

from __future__ import annotations

import inspect
import logging
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.forward_context import get_forward_context

from engine_wrapper.patches import replace_method, replaced_method, watch_method
from engine_wrapper.self_check import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from vllm.model_executor.custom_op import CustomOp

    from engine_wrapper.patches import Undo
    from semblend_trt.runtime import Weights

# Below vLLM's own loggers, so that it shows what is on.
logger = logging.getLogger("vllm.semblend.hooks")

# The methods by which a block pool publishes.
_FULL, _PARTIAL = "cache_full_blocks", "cache_partial_block"
# What vLLM itself calls in its worker at its start and around its steps; none of it writes weights.
_HARMLESS = frozenset(
    {
        "check_health",
        "compile_or_warm_up_model",
        "execute_dummy_batch",
        "execute_model",
        "get_kv_connector_handshake_metadata",
        "get_supported_tasks",
        "initialize_from_config",
        "list_loras",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "shutdown",
        "take_draft_token_ids",
    }
)


# -- objects of vLLM ---------------------------------------------------------------------------------------------------


def _caller(*names: str) -> Any:
    """The nearest object with these attributes whose method is running; None if no such object calls us.

    No supported way leads to these objects. A connector is handed its configuration, the caches and the block pool.
    The static forward context holds layers alone, the forward context metadata, and neither holds the model. A worker
    extension, a scheduler class or a plugin would be options that the user has to set.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        owner = frame.f_locals.get("self")
        if owner is not None and all(hasattr(owner, name) for name in names):
            return owner
    return None


def find_scheduler() -> Any:
    """vLLM's scheduler, which binds its block pool. Raises LookupError if it is of another kind."""
    scheduler = _caller("update_from_output", "reset_prefix_cache")
    if scheduler is None:
        raise LookupError("the scheduler is not among the callers")
    if "reset_running_requests" not in inspect.signature(scheduler.reset_prefix_cache).parameters:
        raise LookupError("the scheduler cannot preempt what is running")
    return scheduler


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """One of vLLM's two model runners as a planned forward sees it.

    `model` is the one that it calls, without wrappers; `groups` are its attention groups. `order` gives the requests of
    the running step in the order of their rows. `remove` leaves the runner as it was found.
    """

    model: Any
    groups: Sequence[Any]
    order: Callable[[], list[str]]
    remove: Undo


def find_runner() -> ModelRunner:
    """The model runner that is registering its caches. V1 holds the running step's batch, V2 makes it for the step.

    Raises LookupError for a runner of another kind, and LayoutError where a replayed graph would run no plan.
    """
    first = _caller("attn_groups", "get_model", "input_batch")
    if first is not None:
        _check_graphs(first.compilation_config.cudagraph_mode)
        return ModelRunner(
            first.get_model(), first.attn_groups[0], lambda: list(first.input_batch.req_ids), lambda: None
        )
    second = _caller("attn_groups", "get_model", "prepare_inputs")
    if second is None:
        raise LookupError("the model runner is of a kind that is not known")
    _check_graphs(second.cudagraph_manager.cudagraph_mode)
    order, undo = watch_order(second)
    return ModelRunner(second.get_model(), second.attn_groups[0], lambda: order, undo)


def _check_graphs(mode: Any) -> None:
    is_whole = mode.name != "PIECEWISE" or getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False)
    if is_whole and mode.name != "NONE":
        raise LayoutError("full_cuda_graphs", f"steps are replayed whole, as cudagraph_mode {mode.name} has it")


# -- changes until the engine ends -------------------------------------------------------------------------------------


def guard_publication(pool: Any, full: Callable[..., Any], partly: Callable[..., Any]) -> Undo:
    """Have `full` and `partly` decide what the block pool publishes; each is given the pool's own method first.

    Raises AttributeError for a pool that publishes in another way.
    """
    with ExitStack() as undo:
        undo.callback(replace_method(pool, _FULL, partial(full, getattr(pool, _FULL))))
        if hasattr(pool, _PARTIAL):
            undo.callback(replace_method(pool, _PARTIAL, partial(partly, getattr(pool, _PARTIAL))))
        logger.info("hook: the block pool publishes exact blocks only")
        return undo.pop_all().close


def watch_resets(pool: Any, note: Callable[[bool], None]) -> Undo:
    """Tell `note` of every reset of vLLM's prefix cache, and whether it was done."""
    undo = watch_method(pool, "reset_prefix_cache", note)
    logger.info("hook: resets of the prefix cache are noticed")
    return undo


def watch_worker_calls(weights: Weights) -> Undo:
    """Have `weights` suspected after every call of the executor that may write them.

    Takes the executor that is registering its caches. Raises LookupError if it is of another kind.
    """

    def after(_: Any, method: Any = None, *__: Any) -> None:
        if not isinstance(method, str) or method not in _HARMLESS:
            weights.suspect()

    executor = _caller("collective_rpc", "driver_worker")
    if executor is None:
        raise LookupError("vLLM's executor is of a kind that is not known")
    undo = watch_method(executor, "collective_rpc", after)
    logger.info("hook: calls that may write weights are noticed")
    return undo


def watch_order(runner: Any) -> tuple[list[str], Undo]:
    """A list of the running step's requests in the order of their rows, which the V2 runner makes for the step alone.

    Every step but dummy runs calls `prepare_inputs` before its forward.
    """
    order: list[str] = []

    def note(batch: Any, *_: Any) -> None:
        order[:] = getattr(batch, "req_ids", ())

    undo = watch_method(runner, "prepare_inputs", note)
    logger.info("hook: the order of a step's requests is noticed")
    return order, undo


def replace_forward(model: Any, forward: Callable[..., Any]) -> Undo:
    """Have `forward` called in the place of the model's."""
    undo = replace_method(model, "forward", forward)
    logger.info("hook: steps with a plan run our forward")
    return undo


# -- changes within one step -------------------------------------------------------------------------------------------


@cache
def _tell_once(what: str) -> None:
    logger.info("hook: %s", what)


@contextmanager
def forward_context(**fields: Any) -> Iterator[Any]:
    """vLLM's forward context with these fields, which are as before at the end."""
    _tell_once("our rows have an attention metadata of their own")
    context = get_forward_context()
    with ExitStack() as undo:
        for name, value in fields.items():
            undo.callback(setattr, context, name, getattr(context, name, None))
            setattr(context, name, value)
        yield context


@contextmanager
def replaced_attention(attention: Any, forward: Callable[..., None]) -> Iterator[None]:
    """Has `forward` called in the place of an attention module's."""
    _tell_once("a check takes K and V where they enter an attention")
    with replaced_method(attention, "forward", forward):
        yield


@contextmanager
def replaced_backend(name: str, attention: Sequence[Any], forward: Callable[..., Any]) -> Iterator[None]:
    """Has `forward` called in the place of the method `name` of every attention's implementation.

    It is given the layer and the stock method first.
    """
    _tell_once(f"our rows may attend in the place of the backend's {name}")
    with ExitStack() as undo:
        for layer, impl in enumerate(each.impl for each in attention):
            undo.enter_context(replaced_method(impl, name, partial(forward, layer, getattr(impl, name))))
        yield


@contextmanager
def own_kernels(modules: Sequence[CustomOp]) -> Iterator[None]:
    """Has layers that are called one by one, which nothing compiles, run vLLM's own kernels for these modules."""
    _tell_once("layers that are called one by one run vLLM's own kernels")
    with ExitStack() as undo:
        undo.callback(_set_methods, modules, [each._forward_method for each in modules])
        _set_methods(modules, [each.forward_cuda for each in modules])
        for op in _ir_ops() if modules else ():
            undo.enter_context(op.set_priority(["vllm_c", "native"]))
        yield


def _set_methods(modules: Sequence[CustomOp], methods: Sequence[Callable[..., torch.Tensor]]) -> None:
    """Has the modules run these methods; a module's own `__setattr__` would take twenty times as long."""
    for each, method in zip(modules, methods, strict=True):
        vars(each)["_forward_method"] = method


@cache
def _ir_ops() -> tuple[Any, ...]:
    """vLLM's operators that have a kernel of its own; none in a version without such a list, where each import would be
    tried again."""
    try:
        from vllm.ir.op import IrOp
    except ImportError:
        return ()
    return tuple(each for each in IrOp.registry.values() if "vllm_c" in each.impls)
