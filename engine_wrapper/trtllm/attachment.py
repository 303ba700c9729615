"""Attaches to TensorRT-LLM's executor: a guard on its cache manager, and plans in its decoder where those can run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine_wrapper.publication import PublicationGuard
from engine_wrapper.trtllm.execution_refusal import execution_refusal
from engine_wrapper.trtllm.manager_guard import guard_for, guard_refusal
from engine_wrapper.trtllm.planned_forward import PlannedForward

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine_wrapper.layer_schedule import EvidenceSink
    from engine_wrapper.trtllm.executor_parts import ExecutorParts
    from engine_wrapper.trtllm.manager_guard import ManagerGuard
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

Change = TypeVar("Change", "ManagerGuard", PlannedForward)


@dataclass(frozen=True, slots=True)
class Attachment:
    """What was attached; where something was not, `guard_refusal` or `execution_refusal` says why.

    Without a guard nothing is attached at all. `forward` executes plans once its self-check has passed.
    """

    guard: ManagerGuard | None
    forward: PlannedForward | None
    guard_refusal: str | None = None
    execution_refusal: str | None = None

    def remove(self) -> None:
        """Leaves the engine as it was found."""
        for part in (self.forward, self.guard):
            if part is not None:
                part.remove()


def attach_to_executor(
    parts: ExecutorParts | None, llm_args: Any, facts: ModelFacts | None, runtime: Runtime,
    pool: torch.Tensor, sink: EvidenceSink,
) -> Attachment:  # fmt: skip
    """Attaches what can be attached, on every rank or on none. Never raises.

    Every rank registers its caches at the same place, so that all of them meet here.
    """
    guard, reason = _guard(parts, facts, runtime)
    if guard is None or parts is None or facts is None:
        logger.warning("not attached to the engine (%s); only identical text from position 0 is reused", reason)
        return Attachment(None, None, reason, reason)
    runtime.publication_guard = True
    forward, refused = _plans(parts, llm_args, facts, runtime, pool, sink)
    if refused is not None:
        logger.warning(
            "plans are not executed on this engine (%s); it can only skip what is reused from the left", refused
        )
    return Attachment(guard, forward, None, refused)


def _guard(
    parts: ExecutorParts | None, facts: ModelFacts | None, runtime: Runtime
) -> tuple[ManagerGuard | None, str | None]:
    """A guard that is installed, or why there is none."""

    def build() -> ManagerGuard:
        assert parts is not None
        return guard_for(parts.manager, PublicationGuard(runtime.active_plans))

    return _installed(
        _guard_refusal(parts, facts, runtime), build, "the engine's cache manager cannot be guarded", runtime
    )


def _guard_refusal(parts: ExecutorParts | None, facts: ModelFacts | None, runtime: Runtime) -> str | None:
    if runtime.pool is None or facts is None:
        return runtime.refusal or "caches_refused"
    if parts is None:
        return "executor_unknown"
    if getattr(parts.executor, "kv_cache_transceiver", None) is not None:
        # Whoever receives a request's KV would publish it.
        return "disaggregated"
    try:
        return guard_refusal(parts.manager)
    except Exception:
        logger.exception("the engine's cache manager cannot be examined")
        return "probe_failed"


def _on_all_ranks(runtime: Runtime, reason: str | None) -> str | None:
    """The reason of any rank: one that publishes what the others withhold, or computes other rows, is one too many."""
    try:
        return next((each for each in runtime.ranks.gather(reason) if each is not None), None)
    except Exception:
        logger.exception("the ranks could not tell one another what they found")
        return reason or "ranks_unknown"


def _plans(
    parts: ExecutorParts, llm_args: Any, facts: ModelFacts, runtime: Runtime, pool: torch.Tensor, sink: EvidenceSink
) -> tuple[PlannedForward | None, str | None]:
    def build() -> PlannedForward:
        max_num_tokens = getattr(llm_args, "max_num_tokens", None)
        return PlannedForward(parts, runtime, pool, facts.rotation, sink, max_num_tokens)

    return _installed(_probed(parts, llm_args, facts), build, "the engine's decoder cannot be hooked", runtime)


def _installed(
    reason: str | None, build: Callable[[], Change], failure: str, runtime: Runtime
) -> tuple[Change | None, str | None]:
    """What `build` makes, installed on every rank; or why it is on none, `reason` being this rank's own."""
    change = None
    if reason is None:
        try:
            change = build()
            change.install()
        except Exception:
            logger.exception(failure)
            change, reason = None, "probe_failed"
    refused = _on_all_ranks(runtime, reason)
    if refused is not None and change is not None:
        change.remove()
    return (change, None) if refused is None else (None, refused)


def _probed(parts: ExecutorParts, llm_args: Any, facts: ModelFacts) -> str | None:
    """Why the engine's decoder is not hooked, None when nothing is known against it."""
    try:
        return execution_refusal(parts, llm_args, facts)
    except Exception:
        logger.exception("the engine's decoder cannot be examined")
        return "probe_failed"
