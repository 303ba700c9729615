"""What plans and cold prompts take in an engine: it runs some of both at its start, over blocks that nothing reads.

A long prompt has the same few blocks again and again: what is computed means nothing, and takes as long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine_wrapper.self_check import KEEP_ALL, plan_over
from kernels.device import seconds_of
from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv
from semblend_trt.cost import CostModel, cold_work, fitted, plan_work
from semblend_trt.plan import SemanticKvPlan, SpanCheck

if TYPE_CHECKING:
    from kernels.layout import PagedKv
    from kernels.rope import Rotation
    from semblend_trt.cost import Floats
    from semblend_trt.ranks import Ranks

logger = logging.getLogger(__name__)

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
        for length in (*_LENGTHS, *_LONGER):
            if length > longest or (length in _LONGER and took > _LONG_SECONDS):
                break
            prompt, blocks = _again(tokens, length), _again(kv.block_ids.tolist(), kv.geometry.blocks_for(length))
            if not cold:
                run(prompt, 0, blocks, None)  # the first forward of all takes memory
            took = seconds(partial(run, prompt, 0, blocks, None))
            cold.append((cold_work(0, length), took))
            for plan in _plans(prompt, kv, samples)[:: 3 if took > _LONG_SECONDS and planned else 1]:
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


def _plans(prompt: list[int], kv: PagedKv, samples: bool) -> list[SemanticKvPlan]:
    """Return plans that compute a few rows, or half of them: unchecked, and checked whole and by a sample."""
    size, layer = len(prompt), min(2, kv.geometry.num_layers - 1)
    checks = [SpanCheck(layer, KEEP_ALL), SpanCheck(layer, KEEP_ALL, sample_every=16, sample_threshold=KEEP_ALL)]
    few = [plan_over(prompt, kv.geometry, 0, size - 16, check) for check in (None, *checks[: 1 + samples])]
    return [few[0], plan_over(prompt, kv.geometry, size // 4, 3 * size // 4, None), *few[1:]]
