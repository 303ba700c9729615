"""The device side of `kernels.span_table`: where a tile's rows lie, and how a tile of keys rotates."""

# Triton decorates untyped functions, and names compile-time constants in capitals.
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.rope import RopeRotation
    from kernels.span_table import SpanTable

_RECORD_WORDS = tl.constexpr(16)
_SPANS_AT = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How much a program does: a tile of about `tile_bytes` of each of `heads` heads in turn.

    With `tokens_first`, neighbouring programs take neighbouring tokens of one layer, else neighbouring layers.
    """

    tile_bytes: int = 16384
    warps: int = 4
    heads: int = 1
    tokens_first: bool = True

    def tokens(self, head_dim: int, dtype: torch.dtype) -> int:
        """Tokens of a tile, a power of two."""
        row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        return int(min(128, max(1, self.tile_bytes // row_bytes)))


def constants(table: SpanTable, dtype: torch.dtype, head_dim: int, rotation: RopeRotation) -> dict[str, Any]:
    """The compile-time arguments that the kernels share: they follow from the model, not from a plan."""
    half = rotation.rotary_dim // 2
    after = head_dim - rotation.end_channel
    return {
        "UNIT": table.unit_bytes // dtype.itemsize,
        "HEAD_DIM": head_dim,
        "FIRST": rotation.first_channel,
        "HALF": half,
        "INTERLEAVED": rotation.interleaved,
        "PAD_HEAD": triton.next_power_of_2(head_dim),
        "PAD_BEFORE": triton.next_power_of_2(rotation.first_channel) if rotation.first_channel else 0,
        "PAD_HALF": triton.next_power_of_2(half),
        "PAD_AFTER": triton.next_power_of_2(after) if after else 0,
    }


def keep_until_read(sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Keeps pinned sources from being handed out anew before a kernel that was just launched has read them.

    torch's allocator of pinned memory knows only of copies, so one element of each is copied behind the kernel.
    """
    if not target.is_cuda:
        return
    for source in {id(source): source for source in sources if not source.is_cuda}.values():
        source.as_strided((1,), (1,)).to(target.device, non_blocking=True)


@triton.jit
def span_of_tile(table, tiles_at, tile):
    """The span record of a tile, and the tile's first token within the span."""
    pair = table + tiles_at + 2 * tile
    return table + _SPANS_AT + _RECORD_WORDS * tl.load(pair), tl.load(pair + 1)


@triton.jit
def rows_at(table, record, positions, live, UNIT: tl.constexpr):
    """Offsets in elements of the rows at `positions`, int64 [TOKENS]."""
    block_size = tl.load(record + 4).to(tl.int32)
    places = positions.to(tl.int32)
    blocks = tl.load(table + tl.load(record + 5) + places // block_size, mask=live, other=0)
    units = blocks * tl.load(record + 1) + (places % block_size) * tl.load(record + 3)
    return units * UNIT


@triton.jit
def plane_at(base, table, record, index, head, UNIT: tl.constexpr):
    """Pointer to channel 0 of one head of address `index`, layer * kinds + kind; `rows_at` offsets count from there."""
    address = tl.load(table + tl.load(record) + index)
    return base + (address + head * tl.load(record + 2)) * UNIT


@triton.jit
def factors_of(table, factors_at, factor, HALF: tl.constexpr, PAD_HALF: tl.constexpr):
    """cos and sin [1, PAD_HALF] of the factors' row `factor`; both 0 when it is -1."""
    factors = (table + factors_at).to(tl.pointer_type(tl.float32))
    planes = tl.arange(0, PAD_HALF)
    mask = (planes < HALF) & (factor >= 0)
    row = factors + 2 * factor * HALF + planes
    cos = tl.load(row, mask=mask, other=0.0)
    sin = tl.load(row + HALF, mask=mask, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def load_part(base, rows, live, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Channels FIRST .. FIRST + COUNT - 1 of the rows, [TOKENS, PADDED], 0 where there is nothing to read."""
    channels = tl.arange(0, PADDED)
    mask = live[:, None] & (channels < COUNT)[None, :]
    return tl.load(base + rows[:, None] + (FIRST + channels)[None, :], mask=mask, other=0.0)


@triton.jit
def store_part(base, rows, live, values, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Writes what `load_part` reads."""
    channels = tl.arange(0, PADDED)
    mask = live[:, None] & (channels < COUNT)[None, :]
    tl.store(base + rows[:, None] + (FIRST + channels)[None, :], values, mask=mask)


@triton.jit
def load_planes(
    base, rows, live, FIRST: tl.constexpr, HALF: tl.constexpr, PAD_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The first and the second channel of each plane, float32 [TOKENS, PAD_HALF] each."""
    if INTERLEAVED:
        both = load_part(base, rows, live, FIRST, 2 * HALF, 2 * PAD_HALF).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], PAD_HALF, 2)))
    else:
        first = load_part(base, rows, live, FIRST, HALF, PAD_HALF).to(tl.float32)
        second = load_part(base, rows, live, FIRST + HALF, HALF, PAD_HALF).to(tl.float32)
    return first, second
