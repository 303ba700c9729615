"""Attaching plan execution and the publication guard to whichever engine a worker belongs to."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_wrapper.publication import PublicationGuard
from engine_wrapper.trtllm.attachment import Attachment, attach_to_executor
from engine_wrapper.trtllm.executor_parts import find_executor
from semblend_trt.plan import EngineMode

if TYPE_CHECKING:
    import torch

    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.plan import CheckEvidence
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

__all__ = ["Attachment", "attach", "attach_to_caller", "note_evidence"]


def attach(runtime: Runtime) -> bool:
    """Attaches plan execution and the publication guard to the runtime's engine; False leaves it untouched.

    Nothing is attached where the worker refused the caches. An engine can be attached to when it has a model runner
    with a `plan_source` and a block manager with a `publication`, as the embedded engine has. A runner with a
    `readiness` waits for loads layer by layer; for any other one `start_load_kv` orders them before the forward. One
    with an `evidence_sink` says what its checks found.
    """
    runner: Any = getattr(runtime.engine, "model_runner", None)
    blocks: Any = getattr(runtime.engine, "block_manager", None)
    if runtime.pool is None or not hasattr(runner, "plan_source") or not hasattr(blocks, "publication"):
        logger.warning("the engine offers no place to attach; only identical text from position 0 is reused")
        return False
    runner.plan_source = runtime.active_plans.take
    if hasattr(runner, "readiness"):
        runner.readiness = runtime.readiness
        runtime.readiness.is_awaited = True
    if hasattr(runner, "evidence_sink"):
        runner.evidence_sink = partial(note_evidence, runtime)
    blocks.publication = PublicationGuard(runtime.active_plans, runtime.pool.geometry.block_size)
    runtime.publication_guard = True
    runtime.mode = EngineMode.WRAPPER
    return True


def attach_to_caller(
    worker: object, llm_args: Any, facts: ModelFacts | None, runtime: Runtime, pool: torch.Tensor
) -> Attachment:
    """Attaches to the TensorRT-LLM executor that is registering `pool` with `worker`. Never raises.

    The guard alone lets the engine skip reused tokens that follow one another from the left. Plans with holes, with
    layers to compute again or with a check are made once `engine_wrapper.trtllm.self_check` has passed.
    """
    try:
        parts = find_executor(worker)
    except Exception:
        logger.exception("the callers of the registration cannot be examined")
        parts = None
    return attach_to_executor(parts, llm_args, facts, runtime, pool, partial(note_evidence, runtime))


def note_evidence(runtime: Runtime, evidence: CheckEvidence) -> None:
    """Keeps evidence for the scheduler. What a dropped plan had placed is written over: nothing approximate is left."""
    runtime.evidence.append(evidence)
    if evidence.is_dropped:
        runtime.active_plans.computed_whole(evidence.request_id)
