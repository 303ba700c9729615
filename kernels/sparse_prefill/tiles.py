"""Cuts a batch's rows into tiles, and the KV of long tiles into pieces, so that one launch fills the card.

The query heads of one KV head are packed into the rows of a tile, so K and V are read once for the whole group: packed
row i of a sequence is its row i // group and query head i % group of that KV head."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.layout import once, to_device

if TYPE_CHECKING:
    from kernels.layout import SequenceRows

# A piece of fewer tokens of KV is not worth a program.
MIN_PIECE = 256
# In tokens of KV: the overhead of a piece for its program, and of each joined piece for the launch.
PIECE_OVERHEAD, JOIN_COST = 256, 4
# Tiles stay whole if, by the bound on list scheduling, they end at most this much later than evenly spread work.
UNEVEN = 1.05


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of one compiled kernel: `block_m` packed rows and `block_n` tokens of KV a tile.

    `resident`: programs of it that one multiprocessor holds; `max_registers`: a thread's, so that these fit, or
    None."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One launch of attention.

    `items`: int32 [items, 7], the heaviest first: first row of the sequence, first and end packed row, first block in
    the batch's block ids, first and end token of KV, slot of the partial output, -1 where the item holds all KV of its
    tile. `tiles`: int32 [tiles, 5], those whose partial outputs are joined: first row of the sequence, first and end
    packed row, first slot, slots. `slots`: partial outputs of all tiles."""

    items: torch.Tensor
    tiles: torch.Tensor
    slots: int


def batch_index(sequences: tuple[SequenceRows, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all sequences' positions, int64 [rows], and block ids, int64 [blocks], on the device, in order."""
    pairs = [(each.positions, each.block_ids) for each in sequences]
    if len(pairs) == 1:
        return pairs[0]
    positions, block_ids = once(sequences, ("index",), lambda: [torch.cat(each) for each in zip(*pairs, strict=True)])
    return positions, block_ids


def row_tiles(sequences: tuple[SequenceRows, ...], rows_per_tile: int) -> torch.Tensor:
    """Return tiles of single rows, int32 [tiles, 4]: the sequence's first row, first and end row in it, first block."""

    def cut() -> torch.Tensor:
        table, _, _ = cut_rows(sequences, 1, rows_per_tile)
        return to_device(torch.from_numpy(table), sequences[0].positions.device)

    return once(sequences, ("rows", rows_per_tile), cut)


def attention_work(
    sequences: tuple[SequenceRows, ...],
    group: int,
    kv_heads: int,
    config: TileConfig,
    processors: int,
    piece: int | None = None,
    window: int | None = None,
) -> AttentionWork:
    """Plan the launch of a batch, once for all layers of one window.

    `group`: query heads a KV head; `processors`: multiprocessors of the card; `piece`: tokens of KV an item may cover,
    a multiple of block_n (else ValueError), or None to cut the KV so that all programs end together."""

    def plan() -> AttentionWork:
        if piece is not None and (piece < 1 or piece % config.block_n):
            raise ValueError(f"piece is {piece}; it must be a multiple of block_n, {config.block_n}")
        table, begins, ends = cut_rows(sequences, group, config.block_m, window)
        # The kernel takes whole tiles of KV from a multiple of their length on.
        begins -= begins % config.block_n
        reach, programs = ends - begins, max(1, processors * config.resident // kv_heads)
        pieces = balanced_pieces(reach, programs, config.block_n) if piece is None else equal_pieces(reach, piece)
        pieces[:, 1:] += begins[pieces[:, :1]]
        return _plan(table, pieces, sequences[0].positions.device)

    return once(sequences, ("work", group, kv_heads, config, processors, piece, window), plan)


def cut_rows(
    sequences: tuple[SequenceRows, ...], group: int, tile: int, window: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each sequence's packed rows into tiles of `tile`, from the last row on.

    So only the first tile, which attends to the fewest tokens, may be short. Rows before a wide gap have tiles of their
    own. With a `window`, rows whose windows leave out tokens in between share none. Returns int32 [tiles, 4] (first row
    of the sequence, first and end packed row, first block) and twice int64 [tiles]: the first token of KV that the
    tile's first row attends to, and the end of those that its last row does."""
    tables, firsts, reaches, first_block = [], [], [], 0
    for sequence in sequences:
        positions = sequence.host_positions.numpy()
        for begin, end in pairwise(part * group for part in _parts(positions, window)):
            ends = np.arange(end, begin, -tile)[::-1]
            table = np.empty((len(ends), 4), dtype=np.int32)
            table[:, 0], table[:, 1], table[:, 2] = sequence.first_row, np.maximum(ends - tile, begin), ends
            table[:, 3] = first_block
            tables.append(table)
            seen = positions[table[:, 1] // group] + 1
            firsts.append(np.maximum(seen - (seen if window is None else window), 0))
            reaches.append(positions[(ends - 1) // group] + 1)
        first_block += sequence.block_ids.shape[0]
    return np.concatenate(tables), np.concatenate(firsts), np.concatenate(reaches)


def longest_part(sequences: tuple[SequenceRows, ...], window: int | None) -> int:
    """Return the most rows of one sequence that may share a tile."""
    if window is None:
        return max(sequence.count for sequence in sequences)
    parts = (_parts(sequence.host_positions.numpy(), window) for sequence in sequences)
    return once(sequences, ("longest", window), lambda: max(int(np.diff(own).max()) for own in parts))


def _parts(positions: np.ndarray, window: int | None) -> list[int]:
    """Return where tiles have to begin, in rows of one sequence, and its end."""
    gaps = np.diff(positions)
    if window is not None:
        return [0, *(np.flatnonzero(gaps > window) + 1).tolist(), len(positions)]
    # A tile with rows on both sides of a wide gap compares all positions of the gap: one more tile takes less time.
    cut = 0
    if positions[-1] - positions[0] >= max(MIN_PIECE, len(positions)):
        wide = np.where(gaps > np.maximum(MIN_PIECE, 2 * positions[:-1]), gaps, 0)
        widest = int(wide.argmax())
        cut = widest + 1 if wide[widest] else 0
    return sorted({0, cut, len(positions)})


def equal_pieces(reach: np.ndarray, piece: int | np.ndarray) -> np.ndarray:
    """Cut each tile's KV every `piece` tokens, one length for all or one for each tile.

    Returns int64 [pieces, 3], tile, first and end token, the tiles in order."""
    counts = -(-reach // piece)
    tiles = np.repeat(np.arange(len(reach)), counts)
    lengths = piece[tiles] if isinstance(piece, np.ndarray) else piece
    begins = (np.arange(len(tiles)) - (np.cumsum(counts) - counts)[tiles]) * lengths
    return np.stack((tiles, begins, np.minimum(begins + lengths, reach[tiles])), axis=1)


def balanced_pieces(reach: np.ndarray, programs: int, block_n: int) -> np.ndarray:
    """Cut the KV of one KV head's tiles for `programs` that run at a time; return as `equal_pieces`.

    Tiles stay whole if they spread evenly enough. Otherwise, of a few cuts, take the one that should end first."""
    longest, total = int(reach.max()), int(reach.sum())
    heaviest = np.sort(reach)[::-1]
    # List scheduling starts a tile at the latest when the heavier ones, spread evenly, would have ended.
    latest = int(((np.cumsum(heaviest) - heaviest) / programs + heaviest).max())
    if longest <= MIN_PIECE or latest * programs <= UNEVEN * total:
        return equal_pieces(reach, longest)
    cuts = [equal_pieces(reach, piece) for piece in _pieces_to_try(reach, programs, block_n)]
    return min(cuts, key=lambda pieces: _end_of(pieces, len(reach), programs))


def _pieces_to_try(reach: np.ndarray, programs: int, block_n: int) -> list[int | np.ndarray]:
    """Return lengths of a piece to try, multiples of block_n: whole tiles, an even share or little more, and others."""
    least, whole = -(-MIN_PIECE // block_n), -(-int(reach.max()) // block_n)
    share = -(-int(reach.sum()) // (programs * block_n))
    lengths = {whole, *(share + share * more // 64 for more in (0, 1, 2, 4))}
    if len(reach) <= programs:  # the shortest with which one round of programs holds all pieces
        candidates = np.arange(share, whole + 1)
        needed = (-(-reach // (candidates[:, None] * block_n))).sum(axis=1)
        lengths.add(int(candidates[np.argmax(needed <= programs)]))
    else:
        lengths |= {-(-share // 2), -(-share // 3)}
    pieces: list[int | np.ndarray] = [*{min(max(length, least), whole) * block_n for length in lengths}]
    left = len(reach) % programs
    if len(reach) > programs and left:  # the lightest tiles, which fill no round of programs, are cut evenly
        lightest = np.argsort(reach)[:left]
        mixed = np.full(len(reach), whole * block_n)
        mixed[lightest] = max(least, -(-int(reach[lightest].sum()) // (programs * block_n))) * block_n
        pieces.append(mixed)
    return pieces


def _end_of(pieces: np.ndarray, num_tiles: int, programs: int) -> int:
    """Return when the last program ends, in tokens of KV; each program takes the heaviest piece that is left."""
    joined = np.bincount(pieces[:, 0], minlength=num_tiles)
    join = JOIN_COST * int(joined[joined > 1].sum())
    heaviest = np.sort(pieces[:, 2] - pieces[:, 1])[::-1] + PIECE_OVERHEAD
    if len(heaviest) <= programs:
        return int(heaviest[0]) + join
    busy = heaviest[:programs][::-1].tolist()
    for tokens in heaviest[programs:].tolist():
        heapreplace(busy, busy[0] + tokens)
    return int(max(busy)) + join


def _plan(table: np.ndarray, pieces: np.ndarray, device: torch.device) -> AttentionWork:
    counts = np.bincount(pieces[:, 0], minlength=len(table))
    joined = counts > 1
    counts = np.where(joined, counts, 0)
    split = joined[pieces[:, 0]]
    items = np.empty((len(pieces), 7), dtype=np.int32)
    items[:, :4] = table[pieces[:, 0]]
    items[:, 4:6] = pieces[:, 1:]
    items[:, 6] = np.where(split, np.cumsum(split) - 1, -1)
    items = items[np.argsort(pieces[:, 1] - pieces[:, 2], kind="stable")]
    tiles = np.empty((int(joined.sum()), 5), dtype=np.int32)
    tiles[:, :3] = table[joined, :3]
    tiles[:, 3], tiles[:, 4] = (np.cumsum(counts) - counts)[joined], counts[joined]
    return AttentionWork(
        to_device(torch.from_numpy(items), device), to_device(torch.from_numpy(tiles), device), int(counts.sum())
    )
