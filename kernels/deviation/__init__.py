"""How far a token's fresh K and V are from its donor's; a deviation check decides by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.deviation import eager
from kernels.deviation.eager import relative, row_squares
from kernels.deviation.spans import Fresh, FreshRows, check_spans
from kernels.dispatch import triton_serves
from kernels.kv_move.move import Move, lie_alike, tensor_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from kernels.rope import RopeRotation

__all__ = [
    "FreshRows",
    "Move",
    "deviation",
    "relative",
    "row_squares",
    "squares",
]


def deviation(spans: Sequence[Move], fresh: Fresh, layer: int, rotation: RopeRotation) -> torch.Tensor:
    """Relative deviation ||fresh - donor|| / ||donor|| of each token of each span, over heads and channels.

    `spans`: a donor's positions (`source_start`) and the positions of `fresh` (`target_start`) that they are compared
    with. The donor's K is rotated by the difference, in float32 and without rounding; `rotation` is that of `layer`.
    float32, bfloat16, float16 and float8_e4m3fn, whose one scale for fresh and donor cancels.

    Returns float32 [kv_factor, tokens] on `fresh`'s device: K, then V (kv_factor 1: the latent row only), the spans'
    tokens one after another. 0 where both are zero, infinite where only the donor is. Allocates nothing of the size of
    the KV; the host does not wait for the card. Raises ValueError, naming the tensor and its bound.
    """
    if not spans:
        return torch.empty(2, 0, device=_tensors(fresh)[0].device)
    found: torch.Tensor = _path_of(spans, fresh, layer, rotation).deviation(spans, fresh, layer, rotation)
    return found


def squares(spans: Sequence[Move], fresh: Fresh, layer: int, rotation: RopeRotation) -> torch.Tensor:
    """The two sums behind `deviation`: of the squares of fresh - donor and of the donor, over heads and channels.

    float32 [2, kv_factor, tokens]. Ranks that share a model's heads add them up; `relative` then gives the deviation
    over all heads. The rest is as in `deviation`.
    """
    if not spans:
        return torch.empty(2, 2, 0, device=_tensors(fresh)[0].device)
    found: torch.Tensor = _path_of(spans, fresh, layer, rotation).squares(spans, fresh, layer, rotation)
    return found


def _path_of(spans: Sequence[Move], fresh: Fresh, layer: int, rotation: RopeRotation) -> ModuleType:
    """Checks the spans; returns the module that serves them."""
    check_spans(spans, fresh, layer, rotation)
    tensors, sources = _tensors(fresh), [span.source for span in spans]
    alike = lie_alike(*sources, *(() if isinstance(fresh, FreshRows) else (fresh,)))
    if alike and triton_serves(tensors[0], (*tensors[1:], *map(tensor_of, sources))):
        from kernels.deviation import triton_deviation

        return triton_deviation
    return eager


def _tensors(fresh: Fresh) -> tuple[torch.Tensor, ...]:
    if not isinstance(fresh, FreshRows):
        return (tensor_of(fresh),)
    return (fresh.k,) if fresh.v is None else (fresh.k, fresh.v)
