"""Ranks: how the processes that share one model agree.

Decisions are rank 0's, or are made from what every rank tells. All ranks make the same calls in the same order: one
that leaves a call out, or makes one more, keeps the others waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Ranks:
    """One process alone, for which nothing has to be sent. `rank` counts from 0 and is below `size`."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, by rank; it must be picklable."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """What rank 0 gives; the others' `value` is not looked at. It must be picklable."""
        return value

    def least(self, values: Sequence[int]) -> list[int]:
        """For each place the smallest number that a rank gives; all give equally many."""
        return list(values)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in the order of the ranks: every rank gets the same bits."""
        return tensor

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, written over `tensor`: the quick form, for activations."""
        return tensor


class EngineRanks(Ranks):
    """Ranks that an engine started and lends its own gathering of picklable values, as TensorRT-LLM does over MPI."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size, self._gather = rank, size, gather

    def gather(self, value: Any) -> list[Any]:
        return list(self._gather(value))

    def broadcast(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def least(self, values: Sequence[int]) -> list[int]:
        return [min(given) for given in zip(*self.gather(list(values)), strict=True)]

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor.cpu())).sum(0).to(tensor.device)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.total(tensor))


class TorchRanks(Ranks):
    """The ranks of this process's `torch.distributed` group. To be made by all of them at the same place.

    Tensors go through the group itself, by NCCL on a card; other values through a group of their own over Gloo, because
    they lie on the host.
    """

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._host = distributed.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, value, group=self._host)
        return gathered

    def broadcast(self, value: Any) -> Any:
        sent = [value if self.rank == 0 else None]
        distributed.broadcast_object_list(sent, src=0, group=self._host)
        return sent[0]

    def least(self, values: Sequence[int]) -> list[int]:
        least = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(least, distributed.ReduceOp.MIN, group=self._host)
        found: list[int] = least.tolist()
        return found

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor.contiguous())
        return torch.stack(parts).sum(0)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(tensor)
        return tensor


def joined_ranks(size: int) -> Ranks | None:
    """The `size` ranks that this process has joined; None when it has joined no group of `torch.distributed`, or one of
    another size."""
    if size == 1:
        return Ranks()
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() != size:
        return None
    return TorchRanks()
