"""SharedLinear: a linear layer of which every rank multiplies a part of the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from semblend_trt.ranks import Ranks


class SharedLinear(nn.Linear):
    """This rank's inputs of a linear layer; what the ranks get for theirs is added up, so that all have the outputs.

    The bias stays on rank 0.
    """

    def __init__(self, linear: nn.Linear, inputs: slice, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(linear.weight[:, inputs].clone(), requires_grad=False)
        self.bias = linear.bias if ranks.rank == 0 else None  # type: ignore[assignment]
        self.out_features, self.in_features = self.weight.shape
        self.ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: [..., this rank's inputs]; returns [..., outputs] of all ranks."""
        return self.ranks.add_up(super().forward(input))
