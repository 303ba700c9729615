"""What a reuse profile tells about its own making."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.results import today
from validation.noninferiority import CONFIDENCE, MARGIN, RESAMPLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from validation.calibration.deviations import PromptDeviations
    from validation.calibration.search import Found, Tried
    from validation.noninferiority import NonInferiority
    from validation.quality.samples import QualityLine


# Which prompts a calibration asks for, by the names of its options.
PROMPT_OPTIONS = ("groups", "questions", "tokens", "plants", "seed", "max_tokens", "min_match_length")
# A figure of an engine in which a profile from elsewhere has been confirmed.
_ENGINE = "engine_confirmed"


def figures_of(found: Found, prompts: Mapping[str, int]) -> list[Any]:
    """JSON-ready: the rule, the prompts' options, the winner's confirmed families, its layer's deviations, and
    everything that was tried."""
    figures: list[Any] = [
        {"what": "rule", "margin": MARGIN, "confidence": CONFIDENCE, "resamples": RESAMPLES},
        {"what": "prompts", **prompts},
    ]
    if found.problem is not None:
        figures.append({"what": "problem", "sentence": found.problem})
    figures += [_confirmed(line) for line in found.lines]
    if found.winner is not None and found.winner.check is not None:
        figures += _deviations(found.deviations, found.winner.check.layer)
    return figures + [_tried(each) for each in found.tried]


def prompts_of(figures: Sequence[Any]) -> tuple[dict[str, int], tuple[str, ...]]:
    """The prompts' options and the confirmed families, as a profile's figures tell them; empty where they do not."""
    told = [figure for figure in figures if isinstance(figure, dict)]
    options = next((figure for figure in told if figure.get("what") == "prompts"), {})
    numbers = {name: value for name, value in options.items() if name in PROMPT_OPTIONS and isinstance(value, int)}
    return numbers, tuple(str(figure.get("family")) for figure in told if figure.get("what") == "confirmed")


def with_engine(
    figures: Sequence[Any], engine: str, lines: Sequence[QualityLine], prompts: Mapping[str, int], command: str
) -> list[Any]:
    """The figures with a confirmation in `engine` after the others, in place of an earlier one there."""
    earlier = {"what": _ENGINE, "engine": engine}
    kept = [each for each in figures if not (isinstance(each, dict) and earlier.items() <= each.items())]
    made = {"date": today(), "command": command, "prompts": dict(prompts)}
    return [*kept, {**earlier, **made, "families": [_confirmed(line) for line in lines]}]


def _confirmed(line: QualityLine) -> dict[str, Any]:
    return {
        "what": "confirmed",
        "family": line.family,
        "prompts": line.samples,
        "groups": line.groups,
        "exact_match": line.exact_match,
        "exact_match_vs_cold": _bound(line.exact_match_bound),
        "log_likelihood_vs_cold": _bound(line.loss_bound),
        "offered_tokens": line.offered,
        "checked_tokens": line.checked,
        "reused_tokens": line.reused,
        "largest_kept": line.largest_kept,
        "computed_share": line.computed_share,
    }


def _bound(bound: NonInferiority | None) -> dict[str, Any] | None:
    if bound is None:
        return None
    return {"difference": bound.difference, "lower": bound.lower if math.isfinite(bound.lower) else None}


def _deviations(found: Sequence[PromptDeviations], layer: int) -> list[dict[str, Any]]:
    """The 5th, 50th, 95th and 99th percentile of the tokens' deviations at the layer, by family."""
    figures = []
    for family in dict.fromkeys(prompt.family for prompt in found):
        values = np.concatenate([prompt.values[layer] for prompt in found if prompt.family == family])
        values = values[np.isfinite(values)]
        if values.size:
            shares = [float(value) for value in np.quantile(values, (0.05, 0.5, 0.95, 0.99))]
            figures.append({"what": "deviation", "family": family, "layer": layer, "p5_p50_p95_p99": shares})
    return figures


def _tried(tried: Tried) -> dict[str, Any]:
    return {
        "what": "tried",
        "stage": tried.stage,
        "candidate": tried.candidate.name,
        "computed_share": tried.candidate.computed_share,
        "holds": tried.verdict.holds,
        "inferior_family": tried.verdict.inferior,
        "comparison": tried.verdict.difference(),
    }
