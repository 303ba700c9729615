"""How far a token's fresh K and V are from its donor's; a deviation check decides by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.device import triton_serves
from kernels.kv_move import gather
from kernels.layout import (
    FreshRows,
    Move,
    PagedKv,
    all_to_device,
    check_dtype,
    check_range,
    check_sources,
    indexable,
    layer_view,
    lie_alike,
)
from kernels.rope import RopeRotation, check_head_dim, rotate_keys

__all__ = ["FreshRows", "Move", "deviation", "relative", "row_squares", "squares", "squares_by_torch"]

_CHUNK = 1024


def deviation(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation) -> torch.Tensor:
    """Return the relative deviation ||fresh - donor|| / ||donor|| of each token of each span, over heads and channels.

    `spans`: a donor's positions (`source_start`) and the rows of `fresh` (`target_start`) that they are compared with.
    The donor's K is rotated by the difference, in float32 and without rounding; `rotation` is that of `layer`.
    float32, bfloat16, float16 and float8_e4m3fn, whose one scale for fresh and donor cancels.

    Returns float32 [kv_factor, tokens] on `fresh`'s device: K, then V (kv_factor 1: the latent row only), the spans'
    tokens one after another. 0 where both are zero, infinite where only the donor is. Allocates nothing of the size of
    the KV; the host does not wait for the card. Raises ValueError, naming the tensor and its bound."""
    return _compared(spans, fresh, layer, rotation)


def squares(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation) -> torch.Tensor:
    """Return the sums that make `deviation`, over heads and channels: of the squares of fresh - donor and of the donor.

    float32 [2, kv_factor, tokens]. Ranks that share a model's heads add them up; `relative` then gives the deviation
    over all heads. The rest is as in `deviation`."""
    return _compared(spans, fresh, layer, rotation, 2)


def _compared(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation, *sums: int) -> torch.Tensor:
    """Return `deviation`, or with `sums` 2 `squares`."""
    if not spans:
        return torch.empty(*sums, 2, 0, device=fresh.k.device)
    check_spans(spans, fresh, layer, rotation)
    sources = {id(span.source): span.source for span in spans}.values()
    if lie_alike(*sources) and triton_serves(fresh.k, (*fresh.planes, *(source.memory for source in sources))):
        from kernels.deviation import triton_deviation

        return triton_deviation.compared(spans, fresh, layer, rotation, *sums)
    found = squares_by_torch(spans, fresh, layer, rotation)
    return found if sums else relative(found)


def relative(squares: torch.Tensor) -> torch.Tensor:
    """Return the relative deviation, float32 [kv_factor, tokens], from what `squares` returns."""
    difference, norm = squares
    return torch.where(difference == 0, 0, (difference / norm).sqrt())


def squares_by_torch(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation) -> torch.Tensor:
    """Serve `squares`, of spans that were checked, in chunks of tokens to keep temporaries small."""
    output = torch.empty(2, len(fresh.planes), sum(span.length for span in spans), device=fresh.k.device)
    column = 0
    for span in spans:
        source = span.source.layers(layer, layer + 1)
        for first in range(0, span.length, _CHUNK):
            length, start = min(_CHUNK, span.length - first), span.target_start + first
            # Both have the shape [kv_factor, kv_heads, tokens, head_dim].
            donor = gather(source, span.source_start + first, length)[0].to(fresh.k.device).float()
            donor = torch.cat((rotate_keys(donor[:1], span.shift, rotation), donor[1:]))
            rows = torch.stack([plane[start : start + length].float() for plane in fresh.planes]).transpose(1, 2)
            output[0, :, column : column + length] = (rows - donor).square().sum(dim=(1, 3))
            output[1, :, column : column + length] = donor.square().sum(dim=(1, 3))
            column += length
    return output


def row_squares(fresh: FreshRows, rows: torch.Tensor, kv: PagedKv, positions: torch.Tensor, layer: int) -> torch.Tensor:
    """Return the sums of `squares` for single rows of `fresh`, each beside a position of `kv` that holds rotated K.

    `rows`, `positions`: int64 [tokens], on the host. Returns float32 [2, kv_factor, tokens] on `fresh`'s device; the
    host does not wait for it. The rows are few, so gathering them costs less than a table of their places."""
    rows, blocks, slots = all_to_device((rows, *kv.places(positions)), fresh.k.device)
    own = [indexable(each).index_select(0, rows) for each in fresh.planes]
    held = [indexable(layer_view(kv.pool, kv.geometry, layer, kind)) for kind in range(len(own))]
    donor = [each[blocks, :, slots] for each in held]
    ours, theirs = torch.stack(own).view(fresh.k.dtype).float(), torch.stack(donor).view(kv.pool.dtype).float()
    return torch.stack([each.square().sum(dim=(-2, -1)) for each in (ours - theirs, theirs)])


def check_spans(spans: Sequence[Move], fresh: FreshRows, layer: int, rotation: RopeRotation) -> None:
    """Raise ValueError, naming the tensor and its bound, unless every span can be compared."""
    for name, tensor in zip("kv", fresh.planes, strict=False):
        if tensor.ndim != 3 or tensor.shape != fresh.k.shape:
            raise ValueError(
                f"fresh.{name} has shape {list(tensor.shape)}; [tokens, kv_heads, head_dim], the same for k and v, "
                "is needed"
            )
        check_dtype(tensor.dtype, f"fresh.{name}")
        if tensor.dtype != fresh.k.dtype or tensor.device != fresh.k.device:
            raise ValueError(
                f"fresh.{name} is {tensor.dtype} on {tensor.device}; fresh.k is {fresh.k.dtype} on {fresh.k.device}"
            )
    tokens, kv_heads, head_dim = fresh.k.shape
    layers = spans[0].source.sizes[0]
    check_head_dim(head_dim, rotation, "fresh")
    check_sources(spans, "spans", "fresh KV", (layers, len(fresh.planes), kv_heads, head_dim), fresh.k)
    if not 0 <= layer < layers:
        raise ValueError(f"layer is {layer}, outside 0..{layers - 1}")
    for index, span in enumerate(spans):
        check_range(f"fresh of spans[{index}] from target_start", span.target_start, span.length, tokens)
