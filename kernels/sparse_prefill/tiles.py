"""How a batch's rows are cut into tiles, and long tiles into pieces of KV, so that one launch fills the card.

The query heads of one KV head are packed into the rows of a tile: packed row i of a sequence is its row i // group and
query head i % group of that KV head, so K and V are read once for the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.sparse_prefill.rows import to_device

if TYPE_CHECKING:
    from kernels.sparse_prefill.rows import SequenceRows

# What a piece costs beside its KV, in tokens of KV: start, writing the partial output and reading it again.
SPLIT_OVERHEAD = 256
MIN_PIECE = 256
MAX_PIECES = 128
# A longest tile below this share of one processor's work cannot leave the card idle for long.
NEGLIGIBLE_SHARE = 8


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of one compiled kernel.

    `block_m` packed rows and `block_n` tokens of KV a tile; `resident`: programs of it that one multiprocessor holds;
    `max_registers`: what a thread may use, so that as many fit, or None.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """Positions and block ids of all sequences on the device: int64 [rows] and int64 [blocks], in order."""

    positions: torch.Tensor
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One launch of attention.

    `items`: int32 [items, 6], the heaviest first: first row of the sequence, first and end packed row, first block in
    the batch's block ids, first token of KV, slot of the partial output. `tiles`: int32 [tiles, 5], for joining the
    partial outputs: first row of the sequence, first and end packed row, first slot, slots. `piece`: tokens of KV an
    item covers; `split`: whether any tile has more than one.
    """

    items: torch.Tensor
    tiles: torch.Tensor
    piece: int
    split: bool


def batch_index(sequences: tuple[SequenceRows, ...]) -> BatchIndex:
    """Joins the index tensors of a batch, once for all layers; those of a single sequence are used as they are."""
    first, key = sequences[0], ("index", sequences[1:])
    if key not in first.memo:
        alone = len(sequences) == 1
        first.memo[key] = BatchIndex(
            first.positions if alone else torch.cat([sequence.positions for sequence in sequences]),
            first.block_ids if alone else torch.cat([sequence.block_ids for sequence in sequences]),
        )
    index: BatchIndex = first.memo[key]
    return index


def row_tiles(sequences: tuple[SequenceRows, ...], rows_per_tile: int) -> torch.Tensor:
    """Tiles of single rows, int32 [tiles, 4]: first row of the sequence, first and end row in it, first block."""
    first, key = sequences[0], ("rows", sequences[1:], rows_per_tile)
    if key not in first.memo:
        table, _ = cut_rows(sequences, 1, rows_per_tile)
        first.memo[key] = to_device(torch.from_numpy(table), first.positions.device)
    tiles: torch.Tensor = first.memo[key]
    return tiles


def attention_work(
    sequences: tuple[SequenceRows, ...],
    group: int,
    kv_heads: int,
    config: TileConfig,
    processors: int,
    piece: int | None = None,
) -> AttentionWork:
    """Plans the launch of a batch, once for all layers.

    `group`: query heads a KV head; `processors`: multiprocessors of the card; `piece`: tokens of KV an item may cover,
    a multiple of block_n, or None to choose it by an estimate of the time. Raises ValueError for another piece.
    """
    first, key = sequences[0], ("work", sequences[1:], group, kv_heads, config, processors, piece)
    if key not in first.memo:
        table, reach = cut_rows(sequences, group, config.block_m)
        if piece is None:
            piece = choose_piece(reach, kv_heads, processors * config.resident, config.block_n)
        if piece < 1 or piece % config.block_n:
            raise ValueError(f"piece is {piece}; it must be a multiple of block_n, {config.block_n}")
        first.memo[key] = _plan(table, reach, piece, first.positions.device)
    work: AttentionWork = first.memo[key]
    return work


def cut_rows(sequences: tuple[SequenceRows, ...], group: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts each sequence's packed rows into tiles of `tile`.

    Returns int32 [tiles, 4] (first row of the sequence, first and end packed row, first block) and int64 [tiles], the
    tokens of KV that the tile's last row attends to.
    """
    tables, reaches, first_block = [], [], 0
    for sequence in sequences:
        begins = np.arange(0, sequence.count * group, tile)
        ends = np.minimum(begins + tile, sequence.count * group)
        table = np.empty((len(begins), 4), dtype=np.int32)
        table[:, 0], table[:, 1], table[:, 2], table[:, 3] = sequence.first_row, begins, ends, first_block
        tables.append(table)
        reaches.append(sequence.host_positions.numpy()[(ends - 1) // group] + 1)
        first_block += sequence.block_ids.shape[0]
    return np.concatenate(tables), np.concatenate(reaches)


def choose_piece(reach: np.ndarray, kv_heads: int, programs: int, block_n: int) -> int:
    """Tokens of KV an item should cover, a multiple of `block_n`, when `programs` of them run at a time.

    The time of a launch is estimated, in tokens of KV, as the larger of its work spread evenly and of the rounds that
    its full pieces need, and half of a piece for the uneven end.
    """
    longest = -(-int(reach.max()) // block_n) * block_n
    load = float(reach.sum()) * kv_heads / programs
    if longest * NEGLIGIBLE_SHARE <= load:
        return longest
    pieces = -(-longest // np.arange(1, MAX_PIECES + 1))
    pieces = np.unique(-(-pieces // block_n) * block_n)
    pieces = pieces[(pieces >= MIN_PIECE) | (pieces == longest)]
    overhead = np.where(pieces < longest, SPLIT_OVERHEAD, 0)
    items = (-(-reach // pieces[:, None])).sum(axis=1)
    full = (reach // pieces[:, None]).sum(axis=1)
    even = load + items * overhead * kv_heads / programs
    rounds = np.ceil(full * kv_heads / programs) * (pieces + overhead)
    uneven = np.where(items * kv_heads > programs, pieces / 2, 0)
    return int(pieces[np.argmin(np.maximum(even + uneven, rounds))])


def _plan(table: np.ndarray, reach: np.ndarray, piece: int, device: torch.device) -> AttentionWork:
    counts = -(-reach // piece)
    first_slots = np.cumsum(counts) - counts
    tile_of = np.repeat(np.arange(len(table)), counts)
    begins = (np.arange(len(tile_of)) - first_slots[tile_of]) * piece
    items = np.empty((len(tile_of), 6), dtype=np.int32)
    items[:, :4] = table[tile_of]
    items[:, 4] = begins
    items[:, 5] = np.arange(len(tile_of))
    work = np.minimum(reach[tile_of] - begins, piece)
    items = items[np.argsort(-work, kind="stable")]
    tiles = np.empty((len(table), 5), dtype=np.int32)
    tiles[:, :3] = table[:, :3]
    tiles[:, 3], tiles[:, 4] = first_slots, counts
    return AttentionWork(
        to_device(torch.from_numpy(items), device),
        to_device(torch.from_numpy(tiles), device),
        piece,
        bool((counts > 1).any()),
    )
