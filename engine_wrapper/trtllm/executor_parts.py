"""The parts of a running PyExecutor that can be attached to.

The connector contract hands a worker the pool and nothing else. The executor that calls the registration is found among
the callers' frames, and known by the worker that it holds. Facts: NVIDIA/TensorRT-LLM,
`_torch/pyexecutor/py_executor.py`, `PyExecutor._maybe_init_kv_connector_manager` (1.1 to main).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

# From the registration up: our own methods, the contract's default forms, and the executor.
_MAX_FRAMES = 16


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """`manager` is the executor's KV cache manager."""

    executor: Any
    manager: Any
    model_engine: Any

    @property
    def model(self) -> Any:
        """The causal language model; None where the engine has none."""
        return getattr(self.model_engine, "model", None)

    @property
    def decoder(self) -> Any:
        """The model without its head; None where the model is laid out in another way."""
        return getattr(self.model, "model", None)


def find_executor(worker: object) -> ExecutorParts | None:
    """The executor that is registering its caches with `worker`, found among the callers; None when none is."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        owner = frame.f_locals.get("self")
        # Only what an object itself holds is read: a property of a foreign class could do anything.
        held = getattr(owner, "__dict__", None) or {}
        connector = held.get("kv_connector_manager")
        if connector is not None and getattr(connector, "worker", None) is worker:
            return ExecutorParts(owner, held.get("kv_cache_manager"), held.get("model_engine"))
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
