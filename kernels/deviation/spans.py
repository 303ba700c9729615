"""Fresh rows of one layer, and the checks that every path makes on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.kv_move.move import Move, check_kv, check_range, check_sources, sizes_of, tensor_of
from kernels.layout import ContiguousKv, PagedKv, check_dtype
from kernels.rope import RopeRotation, check_head_dim

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True)
class FreshRows:
    """K (rotated) and V of one layer from a forward; row i is of position `first_position + i`.

    `k`, `v`: [tokens, kv_heads, head_dim], any strides. `v` is None with kv_factor 1 (MLA).
    """

    k: torch.Tensor
    v: torch.Tensor | None
    first_position: int = 0


Fresh = PagedKv | ContiguousKv | FreshRows


def check_spans(spans: Sequence[Move], fresh: Fresh, layer: int, rotation: RopeRotation) -> None:
    """Raises ValueError, naming the tensor and its bound, unless every span can be compared."""
    if isinstance(fresh, FreshRows):
        _check_rows(fresh)
        layers = sizes_of(spans[0].source)[0]
        kv_factor = 1 if fresh.v is None else 2
        sizes, memory = (layers, kv_factor, *fresh.k.shape[1:]), fresh.k
        first, capacity = fresh.first_position, fresh.k.shape[0]
    else:
        check_kv(fresh, "fresh")
        sizes, memory = sizes_of(fresh), tensor_of(fresh)
        first, capacity = 0, fresh.capacity
    check_head_dim(sizes[3], rotation, "fresh")
    check_sources(spans, "spans", "fresh KV", sizes, memory)
    if not 0 <= layer < sizes[0]:
        raise ValueError(f"layer is {layer}, outside 0..{sizes[0] - 1}")
    for index, span in enumerate(spans):
        what = f"fresh of spans[{index}] from target_start minus first_position"
        check_range(what, span.target_start - first, span.length, capacity)


def _check_rows(rows: FreshRows) -> None:
    for name, tensor in (("k", rows.k), ("v", rows.k if rows.v is None else rows.v)):
        if tensor.ndim != 3 or tensor.shape != rows.k.shape:
            raise ValueError(
                f"fresh.{name} has shape {list(tensor.shape)}; [tokens, kv_heads, head_dim], the same for k and v, is "
                "needed"
            )
        check_dtype(tensor.dtype, f"fresh.{name}")
        if tensor.dtype != rows.k.dtype or tensor.device != rows.k.device:
            raise ValueError(
                f"fresh.{name} is {tensor.dtype} on {tensor.device}; fresh.k is {rows.k.dtype} on {rows.k.device}"
            )
