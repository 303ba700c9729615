"""Changes vLLM's objects, and is the one place that looks for those that vLLM does not hand over.

`docs/vllm.md` lists the changes. Each change has a function here. To undo it, call what the function returns, or leave
its context. If a method is changed already, it is refused (`engine_wrapper.patches`). A step's change is logged once.

Facts: vLLM (0.28 to 0.33), `v1/core/block_pool.py` (`cache_full_blocks`, `cache_partial_block`, and
`reset_prefix_cache`), `v1/core/sched/scheduler.py`, `v1/executor/uniproc_executor.py` (`collective_rpc` runs all that
runs in the worker, also `reload_weights`, `update_weights`, `wake_up`, `apply_model` and a user's own functions),
`v1/worker/gpu_model_runner.py` (V1) and `v1/worker/gpu/model_runner.py` (V2), `forward_context.py`,
`compilation/cuda_graph.py`."""

from __future__ import annotations

import inspect
import logging
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.ir.op import IrOp

from engine_wrapper.patches import replace_method, replaced_method, watch_method
from semblend_trt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm.model_executor.custom_op import CustomOp

    from engine_wrapper.patches import Undo

logger = logging.getLogger(__name__)

# What vLLM itself calls in its worker at its start and around its steps, separated by blanks; it writes no weights.
_HARMLESS = (
    "add_lora check_health compile_or_warm_up_model execute_dummy_batch execute_model "
    "get_kv_connector_handshake_metadata get_supported_tasks initialize_from_config list_loras pin_lora profile "
    "remove_lora reset_encoder_cache reset_mm_cache sample_tokens shutdown take_draft_token_ids"
)


# -- objects of vLLM ---------------------------------------------------------------------------------------------------


def _caller(*names: str) -> Any:
    """The nearest object with these attributes among the callers, or None.

    No supported way leads to these objects. vLLM gives a connector its configuration, the caches and the block pool.
    Forward contexts hold layers and metadata, not the model. The user would have to set an extension, scheduler or
    plugin."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        owner = frame.f_locals.get("self")
        if owner is not None and all(hasattr(owner, name) for name in names):
            return owner
    return None


def find_scheduler() -> Any:
    """Return vLLM's scheduler, which binds its block pool. Raises LookupError if it is of another kind."""
    scheduler = _caller("update_from_output", "reset_prefix_cache")
    if scheduler is None:
        raise LookupError("the scheduler is not among the callers")
    if "reset_running_requests" not in inspect.signature(scheduler.reset_prefix_cache).parameters:
        raise LookupError("the scheduler cannot preempt what is running")
    return scheduler


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """One of vLLM's two model runners as a planned forward sees it.

    `model` is without wrappers; `groups`: its attention groups. `order` gives the running step's requests in the order
    of their rows. A full graph replays a step, without the model's forward, only if each request has at most `replayed`
    tokens; 0 without such graphs. `remove` leaves the runner as it was found. `adapters`: its LoRA manager, or None."""

    model: Any
    groups: Sequence[Any]
    order: Callable[[], list[str]]
    replayed: int
    remove: Undo
    adapters: Any

    @property
    def text_model(self) -> Any:
        """The model, or of one that takes images too the part that reads text."""
        return getattr(self.model, "get_language_model", lambda: self.model)()


def find_runner() -> ModelRunner:
    """Return the runner that is registering its caches. V1 holds the running step's batch, V2 makes it for the step.
    Raises LookupError for a runner of another kind, and LayoutError if a replayed graph would run no plan."""
    if (runner := _caller("attn_groups", "get_model", "input_batch")) is not None:
        replayed = _replayed(runner.compilation_config.cudagraph_mode, runner.uniform_decode_query_len)
        order, undo = lambda: list(runner.input_batch.req_ids), lambda: None
    elif (runner := _caller("attn_groups", "get_model", "prepare_inputs")) is not None:
        replayed = _replayed(runner.cudagraph_manager.cudagraph_mode, runner.decode_query_len)
        order, undo = watch_order(runner)
    else:
        raise LookupError("the model runner is of a kind that is not known")
    adapters = runner.lora_manager if getattr(runner, "lora_config", None) else None
    return ModelRunner(runner.get_model(), runner.attn_groups[0], order, replayed, undo, adapters)


def _replayed(mode: CUDAGraphMode, decode_tokens: int) -> int:
    """Return the most tokens of each request in steps that full graphs replay. Raises LayoutError if they replay any.

    `decode_tokens`: of a request that decodes; with speculation, its drafted tokens and one more."""
    if mode.mixed_mode().name == "FULL" or (mode.name != "NONE" and envs.VLLM_USE_BREAKABLE_CUDAGRAPH):
        raise LayoutError("full_cuda_graphs", f"prefills are replayed whole, as cudagraph_mode {mode.name} has it")
    return decode_tokens if mode.decode_mode().name == "FULL" else 0


def is_latent(attention: Any) -> bool:
    return hasattr(attention, "kv_lora_rank")


def chunk_of(attention: Any) -> int | None:
    """Return the tokens of a layer's chunks, None without any."""
    return getattr(attention, "attention_chunk_size", None)


def writes_rows(attention: Any) -> bool:
    """Return whether the backend writes K and V by a method of its own."""
    return callable(getattr(attention.impl, "do_kv_cache_update", None))


def prefill_backend_of(builder: Any) -> str | None:
    """Return what computes the prompts of a latent attention, None if it does not say."""
    backend = getattr(builder, "_prefill_backend", None)
    return None if backend is None else str(backend.get_name())


def embedding_factor(decoder: Any) -> float | None:
    """Return by what the decoder multiplies its embeddings, as Granite's does."""
    return getattr(getattr(decoder, "config", None), "embedding_multiplier", None)


def attentions_of(model: Any) -> Any:
    """Return what vLLM 0.28 hands to layers of Transformers; None where each attention is an attribute of its layer."""
    return getattr(model, "attention_instances", None)


def adapters_of(manager: Any) -> Any:
    """Return what holds the loaded adapters of a LoRA manager; None if it is of another kind."""
    held = getattr(manager, "_adapter_manager", None)
    names = "list_adapters set_adapter_mapping _last_mapping lora_index_to_id punica_wrapper_mapping"
    return held if all(hasattr(held, name) for name in names.split()) else None


# -- changes until the engine ends -------------------------------------------------------------------------------------


def guard_publication(pool: Any, full: Callable[..., Any], partly: Callable[..., Any]) -> Undo:
    """Have `full` and `partly` decide what the block pool publishes; each gets the pool's own method first. Raises
    AttributeError for a pool that publishes in another way."""
    with ExitStack() as undo:
        undo.callback(replace_method(pool, "cache_full_blocks", partial(full, pool.cache_full_blocks)))
        undo.callback(replace_method(pool, "cache_partial_block", partial(partly, pool.cache_partial_block)))
        logger.info("hook: the block pool publishes exact blocks only")
        return undo.pop_all().close


def watch_resets(pool: Any, note: Callable[[bool], None]) -> Undo:
    """Have `note` called after every reset of vLLM's prefix cache, with whether it was done."""
    undo = watch_method(pool, "reset_prefix_cache", note)
    logger.info("hook: resets of the prefix cache are noticed")
    return undo


def around_update(scheduler: Any, before: Callable[[Any, Any], None], after: Callable[[Any], None]) -> Undo:
    """Call `before` with each step and its output, before vLLM takes the step's tokens; `after` with what vLLM makes of
    it for its front ends: EngineCoreOutputs by client."""
    stock = scheduler.update_from_output

    def update(step: Any, output: Any, *arguments: Any, **options: Any) -> Any:
        before(step, output)
        sent = stock(step, output, *arguments, **options)
        after(sent)
        return sent

    undo = replace_method(scheduler, "update_from_output", update)
    logger.info("hook: answers that a stop string may end carry their receipt with each token")
    return undo


def watch_worker_calls(weights: Any) -> Undo:
    """Suspect `weights` after every call that may write them, of the executor among the callers: it registers its
    caches, or the engine has it that makes its scheduler. Raises LookupError if there is none that is known."""

    def after(_: Any, method: Any = None, *__: Any) -> None:
        if not isinstance(method, str) or method not in _HARMLESS.split():
            weights.suspect()

    executor = _caller("collective_rpc", "driver_worker")
    if executor is None and (engine := _caller("model_executor", "structured_output_manager")) is not None:
        executor = engine.model_executor
    if executor is None:
        raise LookupError("vLLM's executor is of a kind that is not known")
    undo = watch_method(executor, "collective_rpc", after)
    logger.info("hook: calls that may write weights are noticed")
    return undo


def watch_order(runner: Any) -> tuple[Callable[[], list[str]], Undo]:
    """Return what gives the running step's requests, in the order of their rows, and what ends its upkeep. The runner
    calls `prepare_inputs`, which has them, in every step but a dummy run."""
    order: list[str] = []

    def note(batch: Any, *_: Any) -> None:
        order[:] = getattr(batch, "req_ids", ())

    undo = watch_method(runner, "prepare_inputs", note)
    logger.info("hook: the order of a step's requests is noticed")
    return lambda: order, undo


def replace_forward(model: Any, forward: Callable[..., Any]) -> Undo:
    """Have `forward` called in the place of the model's."""
    undo = replace_method(model, "forward", forward)
    logger.info("hook: the model's forward goes through ours, which runs vLLM's own unless a step has a plan")
    return undo


# -- changes within one step -------------------------------------------------------------------------------------------


@cache
def _tell_once(what: str) -> None:
    logger.info("hook: %s", what)


@contextmanager
def forward_context(**fields: Any) -> Iterator[Any]:
    """Yield vLLM's forward context with these fields, which are as before at the end."""
    _tell_once("our rows have an attention metadata of their own")
    context = get_forward_context()
    with ExitStack() as undo:
        for name, value in fields.items():
            undo.callback(setattr, context, name, getattr(context, name, None))
            setattr(context, name, value)
        yield context


@contextmanager
def replaced_attention(attention: Any, forward: Callable[..., None]) -> Iterator[None]:
    """Have `forward` called in the place of an attention module's."""
    _tell_once("a check takes K and V where they enter an attention")
    with replaced_method(attention, "forward", forward):
        yield


@contextmanager
def replaced_backend(name: str, attention: Sequence[Any], forward: Callable[..., Any]) -> Iterator[None]:
    """Have `forward` replace the method `name` of each attention's implementation; it gets layer and stock method."""
    _tell_once(f"our rows may attend in the place of the backend's {name}")
    with ExitStack() as undo:
        for layer, impl in enumerate(each.impl for each in attention):
            undo.callback(replace_method(impl, name, partial(forward, layer, getattr(impl, name))))
        yield


@contextmanager
def own_kernels(modules: Sequence[CustomOp]) -> Iterator[None]:
    """Have layers that are called one by one, which nothing compiles, run vLLM's own kernels for these modules."""
    _tell_once("layers that are called one by one run vLLM's own kernels")
    with ExitStack() as undo:
        undo.callback(_set_methods, modules, [each._forward_method for each in modules])
        _set_methods(modules, [each.forward_cuda for each in modules])
        for op in (each for each in IrOp.registry.values() if "vllm_c" in each.impls) if modules else ():
            undo.enter_context(op.set_priority(["vllm_c", "native"]))
        yield


def set_adapters(manager: Any, mapping: Any) -> None:
    """Have vLLM set a LoRA mapping, whose rows the host sorts: a card would do so after all that is queued."""
    _tell_once("the host sorts rows by their adapters")
    slots = {number: slot for slot, number in enumerate(manager.lora_index_to_id)} | {0: -1}
    sides = {"token_mapping_meta": mapping.index_mapping, "prompt_mapping_meta": mapping.prompt_mapping}
    with ExitStack() as undo:
        for wrapper, (name, ids) in product(manager.punica_wrapper_mapping.values(), sides.items()):
            if (kernels := getattr(wrapper, name, None)) is not None:
                sort = partial(kernels.prepare_tensors, torch.tensor([slots[each] for each in ids]))
                undo.callback(replace_method(kernels, "prepare_tensors", lambda _, sort=sort: sort()))
        manager.set_adapter_mapping(mapping)


def _set_methods(modules: Sequence[CustomOp], methods: Sequence[Callable[..., torch.Tensor]]) -> None:
    """Have the modules run these methods. A module's own `__setattr__` would take twenty times as long."""
    for each, method in zip(modules, methods, strict=True):
        vars(each)["_forward_method"] = method


class StepGraphs:
    """vLLM's CUDA graphs of what lies between two attentions, replayed for rows that are not a step's. They read the
    buffers that steps hand to the model, and one that says which rows are padding."""

    def __init__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, is_padding: torch.Tensor | None = None
    ) -> None:
        """`input_ids`, `positions` and, if the engine has it, `is_padding` begin the buffers, [rows of a step]. Graphs
        of other buffers, or of only parts of the model, are left out."""
        self._buffers = [each for each in (input_ids, positions, is_padding) if each is not None]
        addresses = {each.data_ptr() for each in (input_ids, positions)}
        instances = (each for each in CUDAGraphWrapper._all_instances if each.runtime_mode is CUDAGraphMode.PIECEWISE)
        parts = [each.concrete_cudagraph_entries for each in instances]
        self._batches: list[BatchDescriptor] = []
        for batch in parts[0] if parts and positions.ndim == 1 else ():
            graphs = [part.get(batch) for part in parts]
            is_whole = all(getattr(each, "cudagraph", None) is not None for each in graphs)
            rows = BatchDescriptor(batch.num_tokens, has_lora=batch.has_lora, num_active_loras=batch.num_active_loras)
            if is_whole and batch == rows and addresses <= {at for each in graphs for at in each.input_addresses}:
                self._batches.append(batch)
        self._batches.sort(key=lambda each: (each.num_tokens, each.num_active_loras))

    @contextmanager
    def replayed(
        self, input_ids: torch.Tensor, positions: torch.Tensor, adapters: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the model's inputs, within vLLM's forward context: the buffers, longer by padding, if a graph has room
        for these rows and their LoRA adapters. The step finds its buffers as it left them."""
        rows = len(input_ids)
        having_room = (each for each in self._batches if each.num_tokens >= rows and each.num_active_loras >= adapters)
        batch = next(having_room, None)
        if batch is None:
            yield input_ids, positions
            return
        ids, places, *padding = buffers = [each.as_strided((batch.num_tokens,), (1,)) for each in self._buffers]
        kept = [each.clone() for each in buffers]
        ids[:rows], places[:rows] = input_ids, positions
        for each in padding:
            each[:rows], each[rows:] = False, True
        try:
            with forward_context(batch_descriptor=batch, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE):
                yield ids, places
        finally:
            for each, own in zip(buffers, kept, strict=True):
                each.copy_(own)
