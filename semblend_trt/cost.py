"""What a plan costs in one engine beside the same prompt without it, in seconds, as the engine measured at its start.

The model is linear in the work of a prompt, which counts here for one layer: launches (a layer of one forward), rows (a
token in one layer) and pairs (a row and a key that it attends to). It knows what a plan computes if its check finds
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.plan import SemanticKvPlan

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _rows(begin: int, end: int) -> Floats:
    """Rows and pairs of the positions begin..end-1 in one layer."""
    return np.array([end - begin, (end * end - begin * begin) / 2])


def cold_work(begin: int, end: int, num_layers: int, max_rows: int | None) -> Floats:
    """Return launches, rows and pairs of the positions begin..end-1, in forwards of at most `max_rows` rows."""
    return num_layers * np.array([_forwards(end - begin, max_rows), *_rows(begin, end)])


def plan_work(plan: SemanticKvPlan, max_rows: int | None) -> Floats:
    """Return launches, rows, pairs and checks of a plan whose check finds nothing; its loads are not among them."""
    execution, head = plan.execution, plan.execution.head_tokens
    check, num_layers = execution.check if plan.is_checked else None, execution.num_layers
    begin, end = plan.num_computed_tokens, plan.prompt_length
    exact, moved = np.zeros(2), np.zeros(2)
    sampled = 0
    for span in plan.spans:
        first = span.target_start + (0 if span.exact else min(head, span.length))
        if span.exact:
            exact += _rows(first, span.target_end)
            continue
        moved += _rows(first, span.target_end)
        if check is not None and check.sample_every:
            length = span.target_end - first
            sampled += min(length, check.window_tokens) + -(-max(0, length - check.window_tokens) // check.sample_every)
    computed = _rows(begin, end) - exact - moved
    depth = 0 if check is None else check.layer + 1
    whole = 0.0 if check is None or check.largest_share is None else check.largest_share
    # All moved tokens run through the lowest layers; a sample runs there alone, in a forward of its own.
    lowest = max(execution.recompute_boundary_layer, 0 if sampled else depth)
    rows = num_layers * computed + (lowest + whole * (num_layers - lowest)) * moved
    launches = num_layers * _forwards(rows[0] / num_layers, max_rows)
    if sampled:
        rows += depth * (computed + sampled / moved[0] * moved)
        launches += depth * _forwards(computed[0] + sampled, max_rows)
    return np.array([launches, *rows, float(check is not None)])


def _forwards(rows: float, max_rows: int | None) -> int:
    return 1 if max_rows is None else max(1, int(-(-rows // max_rows)))


def fitted(work: Sequence[Floats], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return seconds for each kind of work, none below 0: least squares of the relative errors.

    Kinds that would get a negative price are left out, one after the other. Raises ValueError if nothing was measured,
    or a time is not positive."""
    times = np.array(seconds, dtype=np.float64)
    if not len(times) or not (times > 0).all():
        raise ValueError(f"seconds are {list(seconds)}; measure at least once, and times above 0")
    relative = np.stack(list(work)) / times[:, None]
    sizes = np.maximum(relative.max(axis=0), np.finfo(np.float64).tiny)
    uses, found = sizes > np.finfo(np.float64).tiny, np.zeros(len(sizes))
    while uses.any():
        found[:] = 0.0
        found[uses] = np.linalg.lstsq((relative / sizes)[:, uses], np.ones(len(times)), rcond=None)[0]
        if found.min() >= 0:
            break
        uses[found.argmin()] = False
    return tuple((found / sizes).tolist())


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds of a load: of each, of each token from the card's own memory, and of each token from the host's."""

    each: float = 0.0
    near: float = 0.0
    far: float = 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices of one engine in seconds: `cold_prices` of `cold_work`, `plan_prices` of `plan_work`, and of loads.

    `max_rows`: most rows of one forward; None for any number."""

    num_layers: int
    max_rows: int | None
    cold_prices: tuple[float, ...]
    plan_prices: tuple[float, ...]
    load: LoadCost

    def cold(self, tokens: int, computed: int = 0) -> float:
        """Return the seconds of a prompt of `tokens`, of which the engine holds the first `computed`."""
        return float(cold_work(computed, tokens, self.num_layers, self.max_rows) @ self.cold_prices)

    def planned(self, plan: SemanticKvPlan, far_tokens: int = 0) -> float:
        """Return the seconds of a plan's forwards and loads; `far_tokens` of its spans come from host memory.

        Exact spans are free: without the plan they would be loaded too."""
        near = plan.reused_tokens - plan.exact_tokens - far_tokens
        loads = self.load.each + near * self.load.near + far_tokens * self.load.far
        return float(plan_work(plan, self.max_rows) @ self.plan_prices) + loads

    def saves(self, plan: SemanticKvPlan, far_tokens: int, share: float) -> bool:
        """Return whether the plan saves at least `share` of the time of its prompt with exact spans alone."""
        without = self.cold(plan.prompt_length, plan.num_computed_tokens + plan.exact_tokens)
        return self.planned(plan, far_tokens) <= (1 - share) * without
