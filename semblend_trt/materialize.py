"""Places a plan's spans: donors' KV moves to the request's blocks, keys rotated to their new positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from semblend_trt.errors import DonorUnavailableError, PlanError
from semblend_trt.plan import PlanKind

if TYPE_CHECKING:
    from kernels.rope import RopeRotation
    from semblend_trt.plan import PlanSpan, SemanticKvPlan

DonorSource = Mapping[str, ContiguousKv] | Callable[[str], ContiguousKv | None]


def materialize(
    plan: SemanticKvPlan, donors: DonorSource, pool: torch.Tensor, geometry: KvGeometry, rotation: RopeRotation
) -> int:
    """Writes every span of `plan` into `pool`, all layers, in one kernel call; returns the tokens moved.

    `donors` gives each donor's KV, [layers, 2, kv_heads, tokens, head_dim], by its id. Only the spans' positions are
    written, and none of them lies below the plan's `num_computed_tokens`. A discovery_only plan moves nothing.

    Raises, always before anything is written: DonorUnavailableError when a donor is missing, shorter than its span or
    of another geometry or dtype; PlanError when the plan has no target blocks or another block size; ValueError when
    the pool does not have the geometry or a block id lies outside it.
    """
    if plan.kind is PlanKind.DISCOVERY_ONLY or not plan.spans:
        return 0
    if plan.target_block_ids is None:
        raise PlanError("blocks_unknown", f"request {plan.request_id}: the plan has spans but no target blocks yet")
    if plan.block_size != geometry.block_size:
        raise PlanError(
            "block_size_differs",
            f"request {plan.request_id}: the plan counts blocks of {plan.block_size} tokens, the pool has blocks of "
            f"{geometry.block_size}",
        )
    held = {donor_id: _donor(donors, donor_id) for donor_id in dict.fromkeys(span.donor_id for span in plan.spans)}
    for span in plan.spans:
        _check_donor(span, held[span.donor_id], pool, geometry)
    target = PagedKv(pool, torch.tensor(plan.target_block_ids, dtype=torch.int64), geometry)
    moves = [Move(held[span.donor_id], span.donor_start, span.target_start, span.length) for span in plan.spans]
    kv_move(moves, target, rotation)
    return plan.reused_tokens


def _donor(donors: DonorSource, donor_id: str) -> ContiguousKv:
    try:
        donor = donors[donor_id] if isinstance(donors, Mapping) else donors(donor_id)
    except KeyError:
        donor = None
    if donor is None:
        raise DonorUnavailableError(f"donor {donor_id} is not held any more; the request is computed instead")
    return donor


def _check_donor(span: PlanSpan, donor: ContiguousKv, pool: torch.Tensor, geometry: KvGeometry) -> None:
    shape = tuple(donor.tensor.shape)
    sizes = (geometry.num_layers, 2, geometry.kv_heads, geometry.head_dim)
    if len(shape) != 5 or (*shape[:3], shape[4]) != sizes:
        raise DonorUnavailableError(
            f"donor {span.donor_id} has shape {list(shape)}; [{sizes[0]}, 2, {sizes[2]}, tokens, {sizes[3]}] is needed"
        )
    if donor.tensor.dtype != pool.dtype:
        raise DonorUnavailableError(f"donor {span.donor_id} is {donor.tensor.dtype}; the pool is {pool.dtype}")
    if shape[3] < span.donor_end:
        raise DonorUnavailableError(
            f"donor {span.donor_id} holds {shape[3]} tokens; the span needs {span.donor_start}..{span.donor_end}"
        )
