"""What an engine runs at its start, before a plan: the self-check, and what plans and cold prompts take.

The self-check computes a prompt of the engine again, whole and by a plan over its own KV. The timing runs over blocks
that nothing reads. A long prompt has the same few blocks again and again: what is computed means nothing, and takes as
long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_wrapper.batch import Batch
from kernels.device import seconds_of
from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv
from kernels.rope import rotate_keys
from semblend_trt.cost import CostModel, cold_work, fitted, plan_work
from semblend_trt.errors import LayoutError
from semblend_trt.plan import BudgetLevel, EngineExecution, EngineMode, PlanKind, PlanSpan, SemanticKvPlan, SpanCheck

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from kernels.layout import KvGeometry, PagedKv
    from kernels.rope import Rotation
    from semblend_trt.cost import Floats
    from semblend_trt.ranks import Ranks

logger = logging.getLogger(__name__)

# Enough for a hole, a span and a suffix of some blocks each; at most the memory of a small prompt.
MIN_TOKENS, MAX_TOKENS = 64, 512
# A threshold must be finite; this one is above every deviation.
KEEP_ALL = 1e30
# Bounds of ||ours - engine's|| / ||engine's||: above the effect of another order of rounding, below a wrong rotation's.
# Where a value lies between two of KV in 16 bit or e4m3, sums of another order end at the other one. On a card
# attention and experts may multiply float32 as TF32, which has the mantissa of float16.
_EXACT_BOUND, _ROUNDED_BOUND = 1e-3, 0.05
_ROTATED_ROWS = 16
# From about this position on engines lose the fraction of position times frequency, in float32.
_FARTHEST = 1 << 15

Run = Callable[[Batch, Mapping[int, SemanticKvPlan], int | None], torch.Tensor]


def _check_plan(tokens: Sequence[int], geometry: KvGeometry, check: SpanCheck) -> SemanticKvPlan:
    """Return a plan of a hole, a span that keeps its place, and a suffix. No token of the span deviates."""
    return plan_over(tokens, geometry, len(tokens) // 4, 3 * len(tokens) // 4, check)


def plan_over(
    tokens: Sequence[int], geometry: KvGeometry, start: int, end: int, check: SpanCheck | None
) -> SemanticKvPlan:
    """Return a plan of request 0 whose span, from `start` to `end`, keeps its place in a prompt of these tokens."""
    return SemanticKvPlan(
        request_id=0,
        kind=PlanKind.REQUEST_LOCAL,
        spans=(PlanSpan("", start, start, end - start),),
        prompt_token_ids=np.array(tokens, dtype=np.int32),
        num_computed_tokens=0,
        matched_tokens=end,
        block_size=geometry.block_size,
        execution=EngineExecution(EngineMode.WRAPPER, geometry.num_layers, check=check),
    )


def differences(
    token_ids: torch.Tensor,
    engine_rows: torch.Tensor,
    geometry: KvGeometry,
    kv_dtype: torch.dtype,
    run: Run,
    as_stored: Callable[[], AbstractContextManager[None]] | None = None,
) -> Iterator[str | None]:
    """Compute a prompt again: whole, by a plan in one forward, by it in several. Yield each difference, or None.

    `token_ids` [tokens] and `engine_rows`, the engine's hidden rows [tokens, hidden], are the prompt's; `kv_dtype` is
    the stored dtype. `run` runs a batch of request id 0 over its blocks, with plans by id and a bound on the rows of a
    forward. `as_stored` is for an engine that reads a run's own KV before it is rounded: within it, rounded KV is read.
    A plan's rows are compared with the whole prompt's there, since both are of the same KV."""
    tokens = len(token_ids)
    batch = Batch((0,), (0,), (tokens,), 1, token_ids)
    yield difference("hidden rows", run(batch, {}, None), engine_rows, kv_dtype)
    # After a check in layer 0 all layers above run on some of the rows.
    plan = _check_plan(token_ids.tolist(), geometry, SpanCheck(0, KEEP_ALL))
    with nullcontext() if as_stored is None else as_stored():
        expected = engine_rows if as_stored is None else run(batch, {}, None)
        for max_rows in (None, tokens // 4):  # half of the span
            own = _suffix_rows(plan, token_ids, run, max_rows)
            yield difference("hidden rows of a plan", own, expected[plan.prefix_end :], kv_dtype)


def sample_difference(
    token_ids: torch.Tensor, engine_rows: torch.Tensor, geometry: KvGeometry, kv_dtype: torch.dtype, run: Run
) -> str | None:
    """Do as `differences`, by plans whose whole span is a check's sample, in all layers. All of it is kept, or a
    quarter is computed by attention: on a card that also compiles what chooses it."""
    found, check = [], SpanCheck(geometry.num_layers - 1, KEEP_ALL, sample_every=1, sample_threshold=KEEP_ALL)
    for levels in ((), (BudgetLevel(KEEP_ALL, 0.25),)):  # all is run: the other ranks run it too
        plan = _check_plan(token_ids.tolist(), geometry, replace(check, levels=levels, compares_all=False))
        own = _suffix_rows(plan, token_ids, run, None)
        found.append(difference("hidden rows of a sampled plan", own, engine_rows[plan.prefix_end :], kv_dtype))
    return next(filter(None, found), None)


def _suffix_rows(plan: SemanticKvPlan, token_ids: torch.Tensor, run: Run, max_rows: int | None) -> torch.Tensor:
    start = plan.prefix_end
    return run(Batch((0,), (start,), (len(token_ids) - start,), 1, token_ids[start:]), {0: plan}, max_rows)


def raise_difference(found: Iterable[str | None], ranks: Ranks) -> None:
    """Raise the first difference of any rank on every rank, as LayoutError: a rank that went on alone would hang."""
    own = [each for each in found if each is not None]  # all is run: the other ranks run it together with this one
    problem = next((each for rank in ranks.gather(own) for each in rank), None)
    if problem is not None:
        raise LayoutError("self_check", problem)


def difference(what: str, ours: torch.Tensor, theirs: torch.Tensor, kv_dtype: torch.dtype) -> str | None:
    """Return how our rows differ from the engine's, whose KV is stored in `kv_dtype`; None if they agree."""
    is_exact = theirs.dtype == kv_dtype == torch.float32 and not theirs.is_cuda
    bound = _EXACT_BOUND if is_exact else _ROUNDED_BOUND
    if ours.shape != theirs.shape:
        return f"{what}: ours are {list(ours.shape)}, the engine's {list(theirs.shape)}"
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    # Written so that NaN fails.
    return None if difference <= bound else f"{what} differ from the engine's by {difference:.3g}, above {bound:g}"


def compare_rotation(
    token_ids: torch.Tensor,
    longest: int,
    rotation: Rotation,
    num_layers: int,
    keys_of: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Move K of the first rows, int64 [tokens], as far as the longest sequence reaches, in every layer. An engine may
    rotate keys in its own way, which no prompt that keeps its place shows.

    `keys_of` has a layer compute K, [rows, kv_heads, head_dim], of embedded tokens at positions, each int64 [rows].
    Raises LayoutError `rope_unknown` for the first layer that computes another K than the moved one."""
    ids = token_ids[:_ROTATED_ROWS]
    shift, here = min(longest, _FARTHEST) - len(ids), torch.arange(len(ids), device=ids.device)
    for layer in range(num_layers):
        before, after = keys_of(layer, torch.cat([ids, ids]), torch.cat([here, here + shift])).chunk(2)
        moved = rotate_keys(before, shift, rotation.of_layer(layer))
        what = f"keys that turn as the model's configuration says, by {shift} positions in layer {layer},"
        if (problem := difference(what, moved, after, after.dtype)) is not None:
            raise LayoutError("rope_unknown", problem)


# -- timing ------------------------------------------------------------------------------------------------------------

# Tokens of the prompts that are timed. The longer ones are timed while none took more than so long.
_LENGTHS, _LONGER, _LONG_SECONDS = (32, 96, 256), (1024, 4096), 0.05
# Computes a prompt's tokens from a position on, in these blocks, with a plan for those before it.
RunPrompt = Callable[[list[int], int, list[int], "SemanticKvPlan | None"], object]


def measured(
    run: RunPrompt,
    tokens: Sequence[int],
    kv: PagedKv,
    rotation: Rotation,
    ranks: Ranks,
    longest: int,
    *,
    samples: bool = True,
) -> CostModel | None:
    """Return what plans cost, or None if it cannot be measured; raises nothing. It writes into the blocks of `kv`.

    `tokens` are some of the vocabulary, and no prompt is longer than `longest`. All `ranks` measure together, and take
    rank 0's times. `samples`: checks may have one."""
    device, took = kv.memory.device, 0.0
    cold, planned = list[tuple["Floats", float]](), list[tuple["Floats", float]]()

    def seconds(call: Callable[[], object]) -> float:
        # On a card the first run compiles kernels.
        first, *later = (ranks.broadcast(seconds_of(call, device)) for _ in range(3 if device.type == "cuda" else 1))
        return float(min(later, default=first))

    try:
        layer = min(2, kv.geometry.num_layers - 1)
        sampled = SpanCheck(layer, KEEP_ALL, sample_every=16, sample_threshold=KEEP_ALL)
        checks = (None, SpanCheck(layer, KEEP_ALL), sampled)[: 2 + samples]
        for length in (*_LENGTHS, *_LONGER):
            if length > longest or (length in _LONGER and took > _LONG_SECONDS):
                break
            prompt, blocks = _again(tokens, length), _again(kv.block_ids.tolist(), kv.geometry.blocks_for(length))
            if not cold:
                run(prompt, 0, blocks, None)  # the first forward of all takes memory
            took = seconds(partial(run, prompt, 0, blocks, None))
            cold.append((cold_work(0, length), took))
            # Plans that compute a few rows, or half of them: unchecked, and checked whole and by a sample.
            few = [plan_over(prompt, kv.geometry, 0, length - 16, check) for check in checks]
            half = plan_over(prompt, kv.geometry, length // 4, 3 * length // 4, None)
            # The half tells what a row and a pair take. By few rows alone a small error there is a large one of a pair.
            for plan in [few[0], half, *few[1:]][: 2 if took > _LONG_SECONDS and planned else None]:
                planned.append((plan_work(plan), seconds(partial(run, prompt, plan.prefix_end, blocks, plan))))
        # A card reads pinned memory of the host in place.
        held = torch.zeros(*kv.sizes[:3], kv.capacity - 1, kv.sizes[3], dtype=kv.memory.dtype)
        held = held.pin_memory() if kv.memory.is_cuda else held
        moves = [Move(ContiguousKv(held), 0, 1, kv.capacity - 1)]
        moved = seconds(partial(kv_move, moves, kv, rotation)) / moves[0].length
        return CostModel(fitted(cold), fitted(planned), moved)
    except Exception:
        logger.exception("what plans cost could not be measured; they are made without regard to it")
        return None


def _again(some: Sequence[int], count: int) -> list[int]:
    return [some[index % len(some)] for index in range(count)]
