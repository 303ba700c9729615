"""What the workers of all ranks say to one another, at calls that the engine makes on every rank alike.

The contract lets rank 0's scheduler tell all workers something, and no worker answer. So the workers agree among
themselves, and the one beside the scheduler tells it the result. An engine of one rank exchanges nothing.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

import semblend_trt
from semblend_trt.errors import ConfigurationError, DonorUnavailableError
from semblend_trt.ranks import EngineRanks, Ranks, joined_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)


def ranks_of(llm_args: Any) -> Ranks | None:
    """The tensor-parallel ranks of the engine; None when they have no way to talk to one another.

    They talk through `torch.distributed` where the engine has joined its processes there, else through the MPI
    functions that TensorRT-LLM's own connector manager uses (`tensorrt_llm/_utils.py`, 1.1 to main).
    """
    size = int(getattr(llm_args, "tensor_parallel_size", None) or 1)
    joined = joined_ranks(size)
    if joined is not None:
        return joined
    try:
        engine = importlib.import_module("tensorrt_llm._utils")
        if engine.mpi_world_size() == size:
            return EngineRanks(engine.mpi_rank(), size, engine.mpi_allgather)
    except (ImportError, AttributeError):
        pass
    return None


def join_ranks(runtime: Runtime, llm_args: Any) -> None:
    """Finds the engine's ranks, unless it has said who they are; without them nothing is reused."""
    if runtime.ranks.size == int(getattr(llm_args, "tensor_parallel_size", None) or 1):
        return
    found = ranks_of(llm_args)
    if found is None:
        logger.warning("KV reuse is off: the ranks of this engine cannot tell one another what became of their loads")
        runtime.refusal = runtime.refusal or "ranks_unknown"
    else:
        runtime.ranks = found


def agree_on_start(runtime: Runtime, error: ConfigurationError | None) -> None:
    """Makes the first refusal of any rank that of all, and its error as well, which is raised on every rank.

    Ranks of different versions refuse: they would read one another's metadata differently.
    """
    told = runtime.ranks.gather((semblend_trt.__version__, runtime.refusal, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = next((text for _, _, text in told if text is not None), None)
    if failed is not None:
        raise ConfigurationError(f"another rank cannot start: {failed}")
    if len({version for version, _, _ in told}) > 1:
        runtime.refusal = runtime.refusal or "metadata_version"
    runtime.refusal = runtime.refusal or next((refusal for _, refusal, _ in told if refusal is not None), None)


def agree_on_loads(
    ranks: Ranks, plans: Sequence[SemanticKvPlan], failures: dict[int, Exception]
) -> dict[int, Exception]:
    """The plans that cannot be used because they were not placed on every rank, each with the reason known here.

    `failures` are this rank's; keys are indices into `plans`, which are the same on every rank.
    """
    if not plans:
        return failures
    placed = ranks.least([index not in failures for index in range(len(plans))])
    lost = DonorUnavailableError("another rank could not place its part of the donors")
    return {index: failures.get(index, lost) for index, is_placed in enumerate(placed) if not is_placed}
