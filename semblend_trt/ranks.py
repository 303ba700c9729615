"""Ranks: how the processes that share one model agree.

Rank 0 decides, or all ranks decide alike from values that each has given. All ranks must make the same calls in the
same order, or some keep waiting."""

from __future__ import annotations

import importlib
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from semblend_trt.errors import DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from semblend_trt.plan import SemanticKvPlan

T = TypeVar("T")

# A rank that is not heard of for so long has failed where it cannot say so, as within a layer.
_LONGEST_WAIT = timedelta(minutes=3)


class RanksApartError(RuntimeError):
    """The ranks do not agree on where they are: none of them can go on."""


class Ranks:
    """One process alone: nothing is sent. `rank` counts from 0 and is below `size`."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in their order; they must be picklable."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, which must be picklable; the others' is ignored."""
        return self.gather(value if self.rank == 0 else None)[0]

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the smallest number at each index over all ranks."""
        return [min(given) for given in zip(*self.gather(list(values)), strict=True)]

    def together(self, run: Callable[[], T], reached: Callable[[], int] = int) -> T:  # noqa: ARG002 - one rank is not apart
        """Return what `run` does on this rank, once all ranks are through it. Raises on all of them what it raises on
        any. Raises RanksApartError if not all come to its end, or `reached` counts other parts of it on each: on a card
        the others do not wait, and what is run next would take the sums that they have left."""
        return run()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in their order: every rank gets the same bits."""
        return tensor


class EngineRanks(Ranks):
    """Ranks that an engine started and lends its own gathering of picklable values, as TensorRT-LLM does over MPI."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size, self._gather = rank, size, gather

    def gather(self, value: Any) -> list[Any]:
        return list(self._gather(value))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor.cpu())).sum(0).to(tensor.device)


class TorchRanks(Ranks):
    """The ranks of this process's `torch.distributed` group; all of them must build this at the same point.

    Tensors go through the group itself, by NCCL on a card. Other values go over Gloo, because they lie on the host."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._host = distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, value, group=self._host)
        return gathered

    def least(self, values: Sequence[int]) -> list[int]:
        least = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(least, distributed.ReduceOp.MIN, group=self._host)
        return list(least.tolist())

    def together(self, run: Callable[[], T], reached: Callable[[], int] = int) -> T:
        error, found, begin = None, list[T](), reached()
        try:
            found.append(run())
        except Exception as raised:
            error = raised
        try:
            parts = reached() - begin
            are_done, least, most = self.least([error is None, parts, -parts])
        except RuntimeError as raised:
            raise RanksApartError(f"a rank did not come to the end of a forward: {raised}") from error
        if least != -most:
            raise RanksApartError(f"a rank failed within a forward: it ran {least} parts, another {-most}") from error
        if error is not None:
            raise error
        if not are_done:
            raise DonorUnavailableError("another rank could not do its part")
        return found[0]

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor.contiguous())
        return torch.stack(parts).sum(0)


def ranks_of(size: int) -> Ranks | None:
    """Return the engine's `size` tensor-parallel ranks; None if they have no way to talk to one another.

    If the engine has joined its processes there, they talk through `torch.distributed`. Else they use the MPI functions
    of TensorRT-LLM's own connector manager (`tensorrt_llm/_utils.py`, 1.1 to main)."""
    if size == 1:
        return Ranks()
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() == size:
        return TorchRanks()
    with suppress(ImportError, AttributeError):
        engine = importlib.import_module("tensorrt_llm._utils")
        if engine.mpi_world_size() == size:
            return EngineRanks(engine.mpi_rank(), size, engine.mpi_allgather)
    return None


def agree_on_loads(
    ranks: Ranks, plans: Sequence[SemanticKvPlan], failures: dict[int, Exception], weights_changes: int
) -> tuple[dict[int, Exception], int]:
    """Return the plans that no rank may use, each with the error known here, and the most weights changes of any rank.

    One rank that cannot place its part is enough. Keys are indices into `plans`, which are the same on every rank."""
    if not plans:
        return failures, weights_changes
    *placed, changes = ranks.least([*(index not in failures for index in range(len(plans))), -weights_changes])
    lost = DonorUnavailableError("another rank could not place its part of the donors")
    return {index: failures.get(index, lost) for index, is_placed in enumerate(placed) if not is_placed}, -changes
