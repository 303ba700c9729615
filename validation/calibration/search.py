"""The search for a dense check, of models that read stock lists: candidates by what they compute, tried by answers.

Deviations under Transformers only nominate them. What such a check may leave uncompared is for the bound to say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semblend_trt.plan import SpanCheck
from semblend_trt.reuse_profile import MAX_THRESHOLD, ProfileCheck, terms_name
from validation.calibration.deviations import PromptDeviations

# Where half of a span deviates, its meaning has changed, and all of it is computed.
MAX_SPAN_SHARE = 0.5
# A plan that saves less costs more than it saves.
MIN_SAVED_SHARE = 0.1
# One token of this number is sampled. The first window of a run, which is compared whole, is most of a short run.
SAMPLE_EVERY = 16
# Thresholds are powers of it: closer ones decide alike, and other prompts of the same families nominate the same ones.
_STEP = 1.2
# Low layers hardly show that a token depends on the one before it: a check is tried with and without computed heads.
_HEADS = (0, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A dense check that a profile can hold, and how many first tokens of a run are always computed.
    `computed_share`: of the tokens times layers that harmless plans offer, the part that it should compute."""

    check: ProfileCheck
    head_tokens: int
    computed_share: float

    @property
    def name(self) -> str:
        """Return the terms in words, for figures and reports."""
        parts = [terms_name("verified", 0, self.check)]
        if self.check.window_threshold is not None:
            parts.append(f"windows {self.check.window_threshold:.4g}")
        return " ".join([*parts, f"head {self.head_tokens}"] if self.head_tokens else parts)

    def sampled(self, harmless: Sequence[PromptDeviations]) -> ProfileCheck:
        """Return the check after a sample, which suspects windows that deviate more than most of the harmless ones."""
        bound = max(window_thresholds(harmless, self.check.layer), default=self.check.threshold)
        changes = {"sample_every": SAMPLE_EVERY, "sample_threshold": min(bound, self.check.threshold)}
        return self.check.model_copy(update=changes)


def candidates(
    harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], num_layers: int, lowest_check: int = 1
) -> list[Candidate]:
    """Return all candidates by computed share: checks at every layer from `lowest_check` on.

    Each has a threshold of tokens, alone or with a lower one of windows, with or without heads."""
    found = []
    for layer in range(lowest_check, num_layers):
        windows = window_thresholds(harmless, layer)
        for threshold in thresholds(harmless, traps, layer):
            below = (None, *(each for each in windows if each < threshold))
            for window, head in itertools.product(below, _HEADS):
                check = ProfileCheck(
                    layer=layer,
                    threshold=threshold,
                    max_span_share=MAX_SPAN_SHARE,
                    min_saved_share=MIN_SAVED_SHARE,
                    window_threshold=window,
                )
                found.append(Candidate(check, head, computed_share(check, head, harmless, num_layers)))
    return sorted((each for each in found if each.computed_share < 1.0), key=lambda each: each.computed_share)


def thresholds(harmless: Sequence[PromptDeviations], traps: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Return thresholds of tokens at `layer`, ascending: high quantiles of harmless tokens, and one between spans.

    That is the geometric mean of two neighbouring means of harmless and trap spans, above the harmless median: of those
    with the largest ratio."""
    wanted = _quantiles((prompt.values[layer] for prompt in harmless), (0.9, 0.95, 0.99, 0.999))
    own, others = (_pooled(prompt.span_means(layer) for prompt in prompts) for prompts in (harmless, traps))
    if own.size:
        pooled = np.sort(np.concatenate([own, others]))
        pooled = pooled[pooled >= max(float(np.median(own)), 1e-6)]
        ratios = pooled[1:] / pooled[:-1]
        if ratios.size and ratios.max() > 1.0:
            widest = int(ratios.argmax())
            wanted.append(math.sqrt(pooled[widest] * pooled[widest + 1]))
    return _rounded(wanted)


def window_thresholds(harmless: Sequence[PromptDeviations], layer: int) -> list[float]:
    """Return thresholds of windows' means at `layer`, ascending: at high quantiles of harmless windows."""
    return _rounded(_quantiles((prompt.window_means(layer) for prompt in harmless), (0.75, 0.85, 0.95)))


def computed_share(
    check: ProfileCheck, head_tokens: int, prompts: Sequence[PromptDeviations], num_layers: int
) -> float:
    """Return the share of offered tokens times layers that check and heads have computed; 1.0 if plans offer none."""
    rule, below = SpanCheck(**check.model_dump()), check.layer / num_layers
    offered, saved = sum(prompt.values.shape[1] for prompt in prompts), 0.0
    for prompt in prompts:
        kept, compared = prompt.kept_and_compared(rule, head_tokens)
        saved += np.count_nonzero(kept) - below * np.count_nonzero(kept & compared)
    return 1.0 - saved / offered if offered else 1.0


def _pooled(arrays: Iterable[npt.NDArray[np.floating]]) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = np.concatenate([np.empty(0), *arrays])
    return np.extract(np.isfinite(values), values)


def _quantiles(arrays: Iterable[npt.NDArray[np.floating]], shares: Sequence[float]) -> list[float]:
    values = _pooled(arrays)
    return np.quantile(values, shares).tolist() if values.size else []


def _rounded(wanted: Iterable[float]) -> list[float]:
    """Return the values rounded to powers of _STEP, ascending, as far as a profile may hold them."""
    powers = {round(math.log(value, _STEP)) for value in wanted if value > 0.0}
    return [value for power in sorted(powers) if (value := _STEP**power) <= MAX_THRESHOLD]
