"""sparse_prefill with a launch of fixed size, so that a CUDA graph can hold it.

A `LaunchShape` fixes the grid for every batch of up to so many rows and sequences. A program reads its tile of rows and
its piece of KV from tables on the device, which are refilled before each replay. Spare items cover no token.
"""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np
import triton
import triton.language as tl

from kernels.dispatch import launch
from kernels.sparse_prefill.tiles import MIN_PIECE, AttentionWork, BatchIndex, TileConfig, cut_rows, equal_pieces
from kernels.sparse_prefill.triton_attention import attend, choose_config, processors_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from kernels.layout import KvGeometry, PoolLayer
    from kernels.sparse_prefill.rows import SequenceRows

ITEM_FIELDS, TILE_FIELDS = 7, 5
# In tokens of KV: the overhead of a piece, and of joining one more. Measured with 1 and 128 rows behind 4k to 32k
# tokens on an H200.
PIECE_OVERHEAD, JOIN_COST = 256, 12
COPIED_WORDS = 512  # by one program


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """A launch for up to `rows` rows of up to `sequences` sequences, `group` query heads a KV head.

    The KV of a tile is cut into `pieces` pieces, or fewer, of equal length.
    """

    rows: int
    sequences: int
    group: int
    config: TileConfig
    pieces: int

    @property
    def tiles(self) -> int:
        """The most tiles that so many rows of so many sequences can have."""
        packed, tile = self.rows * self.group, self.config.block_m
        # A sequence of several rows may be cut at a gap between them.
        parts = min(2 * self.sequences, self.rows)
        return (packed + parts * (tile - 1)) // tile

    @property
    def items(self) -> int:
        return self.tiles * self.pieces


@dataclass(frozen=True, slots=True)
class LaunchTables:
    """What a launch reads, all on one device: `items` int32 [items, 7], `tiles` int32 [tiles, 5], as in AttentionWork;
    `positions` int64 [rows]; `block_ids` int64, those of all sequences in order."""

    items: torch.Tensor
    tiles: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor


def launch_shape(
    rows: int, sequences: int, longest: int, reach: int, q: tuple[int, torch.dtype, torch.device], geometry: KvGeometry
) -> LaunchShape:
    """The shape for a batch whose longest sequence has `longest` rows and whose furthest query sees `reach` tokens.

    `q`: the query's heads, dtype and device. Pieces are 1, 2, 3, 4, 6, 8, 12, ... or as many as fill the card, so that
    few shapes serve all reaches.
    """
    heads, dtype, device = q
    group = heads // geometry.kv_heads
    config = choose_config(longest * group, geometry.head_dim, dtype)
    columns = LaunchShape(rows, sequences, group, config, 1).tiles * geometry.kv_heads
    # One round of programs: a second round was never faster, and spare items cost time.
    most = max(1, processors_of(device) * config.resident // columns)
    counts = {most} | {count for power in range(most.bit_length()) for count in (1 << power, 3 << power)}

    def cost(count: int) -> float:
        return reach / count + PIECE_OVERHEAD + count * JOIN_COST

    allowed = (count for count in counts if count <= most and (count - 1) * MIN_PIECE < reach)
    return LaunchShape(rows, sequences, group, config, min(allowed, key=cost))


def fill_tables(
    shape: LaunchShape,
    sequences: Sequence[SequenceRows],
    items: npt.NDArray[np.int32],
    tiles: npt.NDArray[np.int32],
) -> None:
    """Writes the host's `items` [items, 7] and `tiles` [tiles, 5] for a batch that fits the shape.

    Raises ValueError when it does not.
    """
    rows = sum(sequence.count for sequence in sequences)
    if rows > shape.rows or len(sequences) > shape.sequences:
        raise ValueError(
            f"the batch has {rows} rows of {len(sequences)} sequences; the launch has room for {shape.rows} of "
            f"{shape.sequences}"
        )
    table, _, reach = cut_rows(tuple(sequences), shape.group, shape.config.block_m)
    pieces = equal_pieces(reach, _piece(reach, shape))
    used, counts = len(pieces), np.bincount(pieces[:, 0], minlength=len(table))
    items[:used, :4] = table[pieces[:, 0]]
    items[:used, 4:6] = pieces[:, 1:]
    items[used:] = (0, 0, 1, 0, 0, 0, 0)
    items[:, 6] = np.arange(shape.items)
    tiles[: len(table), :3] = table[:, :3]
    tiles[: len(table), 3], tiles[: len(table), 4] = np.cumsum(counts) - counts, counts
    tiles[len(table) :] = 0


def _piece(reach: np.ndarray, shape: LaunchShape) -> int:
    """The shortest piece, in whole tiles of KV, of which the launch's items hold all, and which is worth its join."""
    tile, furthest = shape.config.block_n, int(reach.max())
    longest = -(-furthest // shape.pieces)
    shortest = max(-(-int(reach.sum()) // shape.items), min(max(isqrt(furthest * JOIN_COST), MIN_PIECE), longest))
    candidates = np.arange(-(-shortest // tile), -(-longest // tile) + 1) * tile
    needed = (-(-reach // candidates[:, None])).sum(axis=1)
    return int(candidates[np.argmax(needed <= shape.items)])


def read_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the first `source[0]` words of pinned `source` to `target`, both int64 [words], on the current stream.

    The card reads the words in place, since its copy engine may be busy with a donor for milliseconds. Other words of
    `target` are left as they were.
    """
    launch(
        _read_kernel, (triton.cdiv(len(source), COPIED_WORDS),), target, source, target, WORDS=COPIED_WORDS, num_warps=4
    )


@triton.jit
def _read_kernel(source_ptr, target_ptr, WORDS: tl.constexpr):
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    used = words < tl.load(source_ptr)
    tl.store(target_ptr + words, tl.load(source_ptr + words, mask=used), mask=used)


def sparse_prefill(
    q: torch.Tensor, kv: PoolLayer, shape: LaunchShape, tables: LaunchTables, scale: float
) -> torch.Tensor:
    """As `kernels.sparse_prefill.sparse_prefill`, for what `fill_tables` wrote; spare rows are left unwritten.

    `q`: [shape.rows, heads, head_dim], its channels side by side. Nothing is checked: the caller filled the tables.
    """
    work = AttentionWork(tables.items, tables.tiles, shape.items)
    index = BatchIndex(tables.positions, tables.block_ids)
    return attend(q, kv, work, index, scale, shape.config)
