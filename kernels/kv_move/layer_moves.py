"""Moves that are made a few layers at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kernels.dispatch import triton_serves
from kernels.kv_move import eager
from kernels.kv_move.move import Move, check_moves, lie_alike, sizes_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.layout import ContiguousKv, PagedKv
    from kernels.rope import RopeRotation


class LayerMoves:
    """The moves of `kernels.kv_move.kv_move`, checked and laid out once, then made for some layers in each call."""

    def __init__(self, moves: Sequence[Move], target: PagedKv | ContiguousKv, rotation: RopeRotation) -> None:
        """`target` has as many layers as go at once, and every source at least as many.

        Raises ValueError, naming the tensor and its bound. What Triton reads is uploaded on the current stream.
        """
        self._room = sizes_of(target)[0]
        check_moves([_of_layers(move, range(self._room)) for move in moves], target, rotation)
        self._layers = min((sizes_of(move.source)[0] for move in moves), default=0)
        self._moves = [move for move in moves if move.length]
        self._target, self._rotation = target, rotation
        self._launch: Callable[[range], None] | None = None
        sources = [move.source for move in self._moves]
        if sources and lie_alike(target, *sources) and triton_serves(tensor_of(target), map(tensor_of, sources)):
            from kernels.kv_move import triton_move

            self._launch = triton_move.prepared(self._moves, target, rotation)

    def make(self, layers: range) -> None:
        """Moves the sources' `layers` to the first layers of the target, on the current stream.

        Raises ValueError for layers that a source or the target does not have.
        """
        if layers.start < 0 or layers.stop > self._layers or len(layers) > self._room:
            raise ValueError(
                f"layers {layers.start}..{layers.stop - 1} cannot be moved: the sources have {self._layers}, the "
                f"target has {self._room}"
            )
        if self._launch is not None:
            self._launch(layers)
        elif self._moves and len(layers):
            part = self._target.layers(0, len(layers))
            eager.kv_move([_of_layers(move, layers) for move in self._moves], part, self._rotation)


def _of_layers(move: Move, layers: range) -> Move:
    return replace(move, source=move.source.layers(layers.start, layers.stop))
