"""What a plan costs in one engine beside the same prompt without it, by what the engine measured at its start.

Work is counted as forwards, rows that run through all layers, and pairs of such a row and a key that it attends to. A
row in some of the layers counts as their share. Of a plan it is what is computed if its check finds nothing; with
levels, what the lowest one computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.plan import SemanticKvPlan

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def cold_work(begin: int, end: int) -> Floats:
    """Return the work of the positions begin..end-1 in one forward: forwards, rows and pairs, float64 [3]."""
    return np.array([1, end - begin, (end * end - begin * begin) / 2])


def plan_work(plan: SemanticKvPlan) -> Floats:
    """Return forwards, rows, pairs and checks of a plan, float64 [4]."""
    execution, check = plan.execution, plan.execution.check if plan.is_checked else None
    found, moved, sampled = cold_work(plan.num_computed_tokens, plan.prompt_length), np.zeros(3), 0
    for span in plan.spans:
        head = 0 if span.exact else min(execution.head_tokens, span.length)
        own = cold_work(span.target_start + head, span.target_end) * (0, 1, 1)
        found -= own
        if not span.exact:
            moved += own
            if check is not None and check.sample_every:
                after = max(0, span.length - head - check.window_tokens)
                sampled += span.length - head - after + -(-after // check.sample_every)
    lowest = execution.recompute_boundary_layer / execution.num_layers
    if check is not None:
        depth = (check.layer + 1) / execution.num_layers
        share = check.levels[0].share if sampled and check.levels else 0
        if sampled:  # in a forward of its own, as is the attention by which a share is chosen
            found = found * (1 + depth + (share > 0)) + depth * sampled / moved[1] * moved
        lowest = max(lowest, 0 if sampled and not (share and check.compares_all) else depth)
        lowest += (check.largest_share or share) * (1 - lowest)
    return np.append(found + lowest * moved, check is not None)


def fitted(measured: Sequence[tuple[Floats, float]]) -> tuple[float, ...]:
    """Return seconds for each kind of work, none below 0, by least squares of the relative errors; from some works with
    their seconds.

    Kinds that would get a negative price are left out, one after the other. Raises ValueError if nothing was measured,
    or a time is not positive."""
    seconds = [each for _, each in measured]
    if not seconds or not all(each > 0 for each in seconds):
        raise ValueError(f"seconds are {seconds}; measure at least once, and times above 0")
    relative = np.stack([work / each for work, each in measured])
    sizes = relative.max(axis=0)
    uses, found = sizes > 0, np.zeros(len(sizes))
    while uses.any():
        found[:] = 0
        found[uses] = np.linalg.lstsq(relative[:, uses] / sizes[uses], np.ones(len(relative)), rcond=None)[0]
        if found.min() >= 0:
            break
        uses[found.argmin()] = False
    return tuple((found / np.where(sizes > 0, sizes, 1)).tolist())


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices in seconds: of `cold_work`, of `plan_work`, and of moving a token from host memory."""

    cold_prices: tuple[float, ...]
    plan_prices: tuple[float, ...]
    move_price: float

    def cold(self, begin: int, end: int) -> float:
        """Return the seconds of computing the positions begin..end-1."""
        return float(cold_work(begin, end) @ self.cold_prices)

    def planned(self, plan: SemanticKvPlan) -> float:
        """Return the seconds of a plan, without moving its exact spans."""
        return float(plan_work(plan) @ self.plan_prices) + (plan.reused_tokens - plan.exact_tokens) * self.move_price

    def saves(self, plan: SemanticKvPlan, share: float) -> bool:
        """Return whether the plan saves at least `share` of the time of its prompt with exact spans alone."""
        without = self.cold(plan.num_computed_tokens + plan.exact_tokens, plan.prompt_length)
        return self.planned(plan) <= (1 - share) * without
