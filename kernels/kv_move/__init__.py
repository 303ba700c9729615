"""Moves a whole plan's KV, all layers and all spans, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.kv_move import eager
from kernels.kv_move.move import Move, check_moves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import ContiguousKv, PagedKv
    from kernels.rope import RopeRotation

__all__ = ["Move", "kv_move"]


def kv_move(moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: RopeRotation) -> None:
    """Writes every move's tokens into `target`: K rotated by `target_start - source_start`, V copied, all layers.

    float32, bfloat16 and float16; a shift of 0 copies K bit for bit. A ContiguousKv source may lie on another device
    than the target (pinned memory is then read without waiting). Raises ValueError, naming the tensor and its bound,
    before anything is written; no moves return at once.
    """
    if not moves:
        return
    check_moves(moves, target, rotation)
    eager.kv_move(moves, target, rotation)
