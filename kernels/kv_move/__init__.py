"""Moves a whole plan's KV, all layers and all spans, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.dispatch import triton_serves
from kernels.kv_move import eager
from kernels.kv_move.layer_moves import LayerMoves
from kernels.kv_move.move import Move, check_moves, lie_alike, tensor_of
from kernels.kv_move.warm_up import warm_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import ContiguousKv, PagedKv
    from kernels.rope import RopeRotation

__all__ = ["LayerMoves", "Move", "kv_move", "warm_up"]


def kv_move(moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: RopeRotation) -> None:
    """Writes every move's tokens into `target`: K rotated by `target_start - source_start`, V copied, all layers.

    float32, bfloat16, float16 and float8_e4m3fn; a shift of 0 copies K bit for bit. With kv_factor 1 (MLA) there is no
    V, and the rotation's `first_channel` says where the latent ends. On CUDA one Triton launch serves all sources on
    the target's device or in pinned host memory, on the current stream; torch serves the rest, and the CPU. A
    ContiguousKv source may lie on another device than the target. Raises ValueError, naming the tensor and its bound,
    before anything is written; no moves return at once.
    """
    if not moves:
        return
    check_moves(moves, target, rotation)
    is_alike = lie_alike(target)
    served = [
        is_alike and lie_alike(move.source) and triton_serves(tensor_of(target), (tensor_of(move.source),))
        for move in moves
    ]
    if any(served):
        from kernels.kv_move import triton_move

        triton_move.kv_move([move for move, yes in zip(moves, served, strict=True) if yes], target, rotation)
    if not all(served):
        eager.kv_move([move for move, yes in zip(moves, served, strict=True) if not yes], target, rotation)
