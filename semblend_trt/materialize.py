"""Places a plan's spans: donors' KV moves to the request's blocks, keys rotated to their new positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.kv_move import Move, kv_move
from kernels.kv_move.move import sizes_of, tensor_of
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from semblend_trt.donors.host_kv import HostKv
from semblend_trt.errors import DonorUnavailableError, PlanError
from semblend_trt.plan import PlanKind

if TYPE_CHECKING:
    from kernels.rope import RopeRotation
    from semblend_trt.plan import PlanSpan, SemanticKvPlan

DonorKv = PagedKv | ContiguousKv | HostKv
DonorSource = Mapping[str, DonorKv] | Callable[[str], DonorKv | None]


def materialize(
    plan: SemanticKvPlan, donors: DonorSource, pool: torch.Tensor, geometry: KvGeometry, rotation: RopeRotation
) -> int:
    """Writes every span of `plan` into `pool`, all layers, in one kernel call; returns the tokens moved.

    `donors` gives each donor's KV by its id: blocks of an arena on the pool's device, or one or several tensors
    [layers, 2, kv_heads, tokens, head_dim]; one plan may mix them. Only the spans' positions are written, and none of
    them lies below the plan's `num_computed_tokens`. A discovery_only plan moves nothing.

    Raises, always before anything is written: DonorUnavailableError when a donor is missing, shorter than its span or
    of another geometry or dtype; PlanError when the plan has no target blocks or another block size; ValueError when
    the pool does not have the geometry or a block id lies outside it.
    """
    if plan.kind is PlanKind.DISCOVERY_ONLY or not plan.spans:
        return 0
    target = target_of(plan, pool, geometry)
    kv_move(moves_of(plan, donors, pool, geometry), target, rotation)
    return plan.reused_tokens


def target_of(plan: SemanticKvPlan, pool: torch.Tensor, geometry: KvGeometry) -> PagedKv:
    """The request's blocks in `pool`. Raises PlanError when the plan has none or counts in another block size."""
    if plan.target_block_ids is None:
        raise PlanError("blocks_unknown", f"request {plan.request_id}: the plan has spans but no target blocks yet")
    if plan.block_size != geometry.block_size:
        raise PlanError(
            "block_size_differs",
            f"request {plan.request_id}: the plan counts blocks of {plan.block_size} tokens, the pool has blocks of "
            f"{geometry.block_size}",
        )
    return PagedKv(pool, block_vector(plan.target_block_ids), geometry)


def block_vector(block_ids: Sequence[int]) -> torch.Tensor:
    """Block ids as int64 [n] on the host; torch itself reads a long sequence three times as slowly."""
    return torch.from_numpy(np.fromiter(block_ids, dtype=np.int64, count=len(block_ids)))


def moves_of(plan: SemanticKvPlan, donors: DonorSource, pool: torch.Tensor, geometry: KvGeometry) -> list[Move]:
    """The plan's spans as moves, several for a span of a donor in parts; none for a discovery_only plan.

    Raises DonorUnavailableError as `materialize` does.
    """
    if plan.kind is PlanKind.DISCOVERY_ONLY:
        return []
    held = {donor_id: _donor(donors, donor_id) for donor_id in dict.fromkeys(span.donor_id for span in plan.spans)}
    for span in plan.spans:
        _check_donor(span, held[span.donor_id], pool, geometry)
    return [move for span in plan.spans for move in _moves_of_span(span, held[span.donor_id])]


def _moves_of_span(span: PlanSpan, donor: DonorKv) -> list[Move]:
    if not isinstance(donor, HostKv):
        return [Move(donor, span.donor_start, span.target_start, span.length)]
    moves, target = [], span.target_start
    for part, start, length in donor.pieces(span.donor_start, span.length):
        moves.append(Move(part, start, target, length, turn=span.shift))
        target += length
    return moves


def _donor(donors: DonorSource, donor_id: str) -> DonorKv:
    try:
        donor = donors[donor_id] if isinstance(donors, Mapping) else donors(donor_id)
    except KeyError:
        donor = None
    if donor is None:
        raise DonorUnavailableError(f"donor {donor_id} is not held any more; the request is computed instead")
    return donor


def _check_donor(span: PlanSpan, donor: DonorKv, pool: torch.Tensor, geometry: KvGeometry) -> None:
    for part in donor.parts if isinstance(donor, HostKv) else (donor,):
        _check_part(span, part, pool, geometry)
    if donor.capacity < span.donor_end:
        raise DonorUnavailableError(
            f"donor {span.donor_id} holds {donor.capacity} tokens; the span needs {span.donor_start}..{span.donor_end}"
        )


def _check_part(span: PlanSpan, donor: PagedKv | ContiguousKv, pool: torch.Tensor, geometry: KvGeometry) -> None:
    memory = tensor_of(donor)
    needed = (geometry.num_layers, geometry.kv_factor, geometry.kv_heads, geometry.head_dim)
    if isinstance(donor, ContiguousKv) and donor.tensor.ndim != 5:
        raise DonorUnavailableError(
            f"donor {span.donor_id} has shape {list(donor.tensor.shape)}; [layers, 2, kv_heads, tokens, head_dim] is "
            "needed"
        )
    if sizes_of(donor) != needed:
        raise DonorUnavailableError(
            f"donor {span.donor_id} has shape {list(memory.shape)} and (layers, 2, kv_heads, head_dim) "
            f"{sizes_of(donor)}; {needed} is needed"
        )
    if memory.dtype != pool.dtype:
        raise DonorUnavailableError(f"donor {span.donor_id} is {memory.dtype}; the pool is {pool.dtype}")
    if isinstance(donor, PagedKv) and memory.device != pool.device:
        raise DonorUnavailableError(f"donor {span.donor_id} is on {memory.device}; the pool is on {pool.device}")
