"""What a calibration tries, the cheapest first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from engine_wrapper.span_choice import choose
from semblend_trt.reuse_profile import MAX_THRESHOLD, ProfileCheck
from semblend_trt.span_check import SpanCheck

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from validation.calibration.deviations import PromptDeviations

# A span that deviates by half is a span whose meaning has changed; what is left of it is not worth a doubt.
MAX_SPAN_SHARE = 0.5
# Below this share a plan saves less than its check costs.
MIN_SAVED_SHARE = 0.1
# Of the harmless tokens' deviations: a threshold there lets all but these parts pass.
_QUANTILES = (0.6, 0.75, 0.9, 0.95, 0.99, 0.999)
# Thresholds closer to each other than this factor decide alike.
_SAME = 1.1
# A token right behind one that differs is bound to it by what lower layers hardly show: the second digit of a number to
# the first. So a check is tried alone and with this many first tokens of every span computed.
_HEADS = (0, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that a profile can hold. `computed_share`: tokens times layers that it computes of what a plan offers,
    on harmless prompts, as their deviations foretell; `trap_share`: the same on trap prompts."""

    policy: str
    computed_share: float
    trap_share: float
    boundary: int = 0
    check: ProfileCheck | None = None
    head_tokens: int = 0

    @property
    def full_layers(self) -> int:
        """Lowest layers that are computed for every token."""
        return max(self.boundary, 0 if self.check is None else self.check.layer)

    @property
    def name(self) -> str:
        if self.check is not None:
            head = f" head {self.head_tokens}" if self.head_tokens else ""
            return f"{self.policy} layer {self.check.layer} threshold {self.check.threshold:.4g}{head}"
        return f"{self.policy} {self.boundary}" if self.boundary else self.policy


def candidates(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], num_layers: int
) -> list[Candidate]:
    """Everything worth trying, by computed share: position_fix, every boundary, and checks in every layer but 0, with
    and without heads of spans computed."""
    found = [Candidate("position_fix", 0.0, 0.0)]
    found += [Candidate("boundary", b / num_layers, b / num_layers, boundary=b) for b in range(1, num_layers)]
    for layer in range(1, num_layers):
        for threshold in thresholds(harmless, traps, layer):
            check = ProfileCheck(
                layer=layer, threshold=threshold, max_span_share=MAX_SPAN_SHARE, min_saved_share=MIN_SAVED_SHARE
            )
            for head in _HEADS:
                ours, theirs = (computed_share(check, head, prompts, num_layers) for prompts in (harmless, traps))
                found.append(Candidate("verified", ours, theirs, check=check, head_tokens=head))
    return sorted((each for each in found if each.computed_share < 1.0), key=lambda each: each.computed_share)


def thresholds(harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Thresholds between harmless and trap deviations at `layer`: in the largest gap between the means of spans, and
    where few harmless tokens lie above. Ascending, none beyond what a profile may hold."""
    if not harmless:
        return []
    tokens = np.concatenate([prompt.values[layer] for prompt in harmless])
    tokens = tokens[np.isfinite(tokens)]
    wanted = [float(value) for value in np.quantile(tokens, _QUANTILES)] if tokens.size else []
    gap = _largest_gap(
        *(np.concatenate([p.span_means(layer) for p in prompts] or [np.empty(0)]) for prompts in (harmless, traps))
    )
    kept: list[float] = []
    for value in sorted(wanted if gap is None else [*wanted, gap]):
        if 0.0 < value <= MAX_THRESHOLD and (not kept or value > _SAME * kept[-1]):
            kept.append(value)
    return kept


def computed_share(
    check: ProfileCheck, head_tokens: int, prompts: Sequence[PromptDeviations], num_layers: int
) -> float:
    """Tokens times layers that the check and the heads have computed, as a share of all that the plans offer; 1.0 of
    nothing."""
    rule = SpanCheck(**check.model_dump())
    offered = sum(prompt.values.shape[1] for prompt in prompts)
    kept = 0
    for prompt in (prompt.behind(head_tokens) for prompt in prompts):
        if prompt.lengths:
            deviations = prompt.values[check.layer]
            kept += choose(rule, deviations, prompt.lengths, prompt.exact_tokens, prompt.promised).kept_tokens
    return 1.0 - kept / offered * (1.0 - check.layer / num_layers) if offered else 1.0


def _largest_gap(harmless: npt.NDArray[np.float64], traps: npt.NDArray[np.float64]) -> float | None:
    """The geometric middle of the widest gap, in ratio, between neighbouring means of spans above the harmless median;
    None where no trap lies above it."""
    if not harmless.size:
        return None
    middle = float(np.median(harmless))
    pooled = np.sort(np.concatenate([harmless, traps]))
    pooled = pooled[np.isfinite(pooled) & (pooled >= max(middle, 1e-6))]
    widest = max(_ratios(pooled.tolist()), default=None)
    return None if widest is None or widest[0] <= 1.0 else widest[1]


def _ratios(ascending: Sequence[float]) -> Iterator[tuple[float, float]]:
    for below, above in pairwise(ascending):
        yield above / below, math.sqrt(below * above)
