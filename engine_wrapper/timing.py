"""What plans and cold prompts take in an engine: it runs some of both at its start, over blocks that nothing reads.

A long prompt has the same few blocks again and again: what is computed means nothing, and takes as long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine_wrapper.self_check import KEEP_ALL, plan_over
from kernels.device import seconds_of
from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, PagedKv
from semblend_trt.cost import CostModel, Floats, LoadCost, cold_work, fitted, plan_work
from semblend_trt.plan import SpanCheck

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.rope import Rotation
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.ranks import Ranks

logger = logging.getLogger("vllm.semblend")

# Tokens of the prompts that are timed, until one of them takes long.
_LENGTHS = (32, 96, 256, 1024, 4096)
_LONG_SECONDS = 0.05
# Rows that a plan leaves at most, and one in so many tokens of a sample.
_FEW_ROWS, _SAMPLE_EVERY = 16, 16
_COPIED_BYTES = 32 << 20

# Runs the positions begin..end-1 of a prompt of token 0.., with a plan for those before `begin`, or cold.
RunPrompt = Callable[[int, int, "SemanticKvPlan | None"], object]


def tokens_of(some: Sequence[int], count: int) -> list[int]:
    """Return `count` tokens: these, again and again."""
    return [*some] * (count // len(some)) + [*some][: count % len(some)]


def measured(
    run: RunPrompt,
    tokens: Sequence[int],
    kv: PagedKv,
    rotation: Rotation,
    ranks: Ranks,
    max_rows: int | None,
    longest: int,
    *,
    samples: bool = True,
) -> CostModel | None:
    """Return what plans cost, or None if it cannot be measured; raises nothing.

    `run` runs a prompt of `tokens_of(tokens, count)` and writes into the blocks of `kv`; `longest` is the count of the
    longest prompt. All `ranks` measure together, and take rank 0's times. `samples`: checks may have one."""
    try:
        geometry, device = kv.geometry, kv.memory.device

        def seconds(call: Callable[[], object]) -> float:
            # On a card the first run compiles kernels.
            first, *later = (ranks.broadcast(seconds_of(call, device)) for _ in range(3 if kv.memory.is_cuda else 1))
            return float(min(later, default=first))

        run(0, min(_LENGTHS[0], longest), None)  # takes memory
        cold, planned = list[tuple[Floats, float]](), list[tuple[Floats, float]]()
        for length in _LENGTHS:
            if length > min(longest, max_rows or longest):
                break
            took = seconds(lambda length=length: run(0, length, None))  # type: ignore[misc]
            cold.append((cold_work(0, length, geometry.num_layers, max_rows), took))
            plans = list(_plans(tokens_of(tokens, length), kv, samples))
            for plan in plans[::3] if planned and took > _LONG_SECONDS else plans:
                time = seconds(lambda plan=plan: run(plan.prefix_end, plan.prompt_length, plan))  # type: ignore[misc]
                planned.append((plan_work(plan, max_rows), time))
            if took > _LONG_SECONDS and len(cold) > 2:
                break
        prices = fitted(*zip(*cold, strict=True)), fitted(*zip(*planned, strict=True))
        return CostModel(geometry.num_layers, max_rows, *prices, _load_cost(kv, rotation, seconds))
    except Exception:
        logger.exception("what plans cost could not be measured; they are made without regard to it")
        return None


def _plans(tokens: Sequence[int], kv: PagedKv, samples: bool) -> Iterator[SemanticKvPlan]:
    """Plans with few rows and with half of them, unchecked, checked and sampled in a low layer."""
    length, layer = len(tokens), min(2, kv.geometry.num_layers - 1)
    few, half = (0, length - _FEW_ROWS), (length // 4, 3 * length // 4)
    full = SpanCheck(layer, KEEP_ALL)
    sample = SpanCheck(layer, KEEP_ALL, sample_every=_SAMPLE_EVERY, sample_threshold=KEEP_ALL)
    for (start, end), check in ((few, None), (half, None), (few, full), *([(few, sample)] if samples else [])):
        yield plan_over(tokens, kv.geometry, start, end, check)


def _load_cost(kv: PagedKv, rotation: Rotation, seconds: Callable[[Callable[[], object]], float]) -> LoadCost:
    """The cost of moving a donor's tokens, one and many, into the blocks of `kv`, and of copying them from the host."""
    layers, kinds, heads, width = kv.sizes
    many, memory = kv.capacity - 1, kv.memory
    held = ContiguousKv(memory.new_zeros(layers, kinds, heads, many, width))
    one, all_ = (seconds(lambda n=n: kv_move([Move(held, 0, 1, n)], kv, rotation)) for n in (1, many))  # type: ignore[misc]
    near = far = max(0.0, (all_ - one) / max(1, many - 1))
    if memory.is_cuda:
        pinned = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(pinned, device=memory.device)
        copied = seconds(lambda: target.copy_(pinned, non_blocking=True))
        far += copied / _COPIED_BYTES * kv.geometry.bytes_per_token(memory.dtype)
    return LoadCost(one, near, far)
