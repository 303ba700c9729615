"""vLLM's two model runners as a planned forward sees them.

Facts: vLLM, `v1/worker/gpu_model_runner.py` (V1) and `v1/worker/gpu/model_runner.py` (V2; 0.25.1 and 0.28). Both call
the model with the same keywords and keep the layers' attention metadata in the forward context. V1 holds the running
step's batch; V2 makes it for the step and hands it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import envs

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm.refusals import callers

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """`runner` is vLLM's own, `model` the one that it calls, without wrappers.

    `order` gives the requests of the running step in the order of their rows; `remove` leaves the runner as it was
    found.
    """

    runner: Any
    model: Any
    order: Callable[[], list[str]]
    remove: Callable[[], None]


def model_runner_of_caller() -> ModelRunner:
    """The model runner that is registering its caches: a connector is handed nothing but them.

    Raises LookupError for a runner of another kind, and LayoutError where a replayed graph would run no plan.
    """
    for owner in callers():
        if not hasattr(owner, "attn_groups") or not hasattr(owner, "get_model"):
            continue
        if hasattr(owner, "input_batch"):
            return _first(owner)
        if hasattr(owner, "prepare_inputs"):
            return _second(owner)
    raise LookupError("the model runner is of a kind that is not known")


def _first(runner: Any) -> ModelRunner:
    _check_graphs(runner.compilation_config.cudagraph_mode)
    return ModelRunner(runner, runner.get_model(), lambda: list(runner.input_batch.req_ids), lambda: None)


def _second(runner: Any) -> ModelRunner:
    _check_graphs(runner.cudagraph_manager.cudagraph_mode)
    watched = _PreparedInputs(runner)
    return ModelRunner(runner, runner.get_model(), lambda: watched.request_ids, watched.remove)


def _check_graphs(mode: Any) -> None:
    is_whole = mode.name != "PIECEWISE" or getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False)
    if is_whole and mode.name != "NONE":
        raise LayoutError("full_cuda_graphs", f"steps are replayed whole, as cudagraph_mode {mode.name} has it")


class _PreparedInputs:
    """In the place of the V2 runner's `prepare_inputs`, which every step but dummy runs calls before its forward."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._stock = runner, runner.prepare_inputs
        self.request_ids: list[str] = []
        runner.prepare_inputs = self._prepare

    def remove(self) -> None:
        vars(self._runner).pop("prepare_inputs", None)

    def _prepare(self, *arguments: Any, **options: Any) -> Any:
        batch = self._stock(*arguments, **options)
        self.request_ids = list(getattr(batch, "req_ids", ()))
        return batch
