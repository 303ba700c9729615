"""Samples of one arm on one workload and size, as one line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from validation.metrics import mean, median, percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from validation.samples import Sample


@dataclass(frozen=True, slots=True)
class Summary:
    """TTFT, speed-up and token counts are over timed samples, the rest over all; None where no sample has the figure.

    `speedup` is the median over cases of cold's TTFT divided by the arm's. `exact_match`, `rouge*`, `token_f1`,
    `first_token_kl`, `token_agreement` and the token counts are means, `perplexity_ratio` is a median.
    """

    arm: str
    workload: str
    size: str
    samples: int
    timed: int
    ttft_median_s: float | None
    ttft_p95_s: float | None
    speedup: float | None
    exact_match: float | None
    rouge1_cold: float | None
    rouge_l_cold: float | None
    token_f1_cold: float | None
    rouge1_reference: float | None
    rouge_l_reference: float | None
    token_f1_reference: float | None
    perplexity_ratio: float | None
    first_token_kl: float | None
    token_agreement: float | None
    prompt_tokens: float | None
    exact_prefix_tokens: float | None
    reused_tokens: float | None
    computed_tokens: float | None
    fires: int
    outcomes: dict[str, int]
    scored_perplexity: float | None
    judge_score: float | None
    judge_failures: int


def summarise(samples: Sequence[Sample]) -> list[Summary]:
    """One line for each arm, workload and size, in the order in which they appear."""
    keys = dict.fromkeys((sample.workload, sample.size, sample.arm) for sample in samples)
    return [
        summary(arm, workload, size, [s for s in samples if (s.workload, s.size, s.arm) == (workload, size, arm)])
        for workload, size, arm in keys
    ]


def summary(arm: str, workload: str, size: str, samples: Sequence[Sample]) -> Summary:
    """One line of the given samples, whatever they are."""
    timed = [sample for sample in samples if sample.timed]
    ttft = [sample.ttft_s for sample in timed]
    outcomes = Counter(_outcome(sample) for sample in samples if sample.outcome is not None)
    return Summary(
        arm=arm,
        workload=workload,
        size=size,
        samples=len(samples),
        timed=len(timed),
        ttft_median_s=median(ttft),
        ttft_p95_s=percentile(ttft, 0.95),
        speedup=median(_known(sample.speedup for sample in samples)),
        exact_match=mean([float(match) for match in _known(sample.exact_match for sample in samples)]),
        rouge1_cold=mean([sample.rouge1_cold for sample in samples]),
        rouge_l_cold=mean([sample.rouge_l_cold for sample in samples]),
        token_f1_cold=mean([sample.token_f1_cold for sample in samples]),
        rouge1_reference=mean(_known(sample.rouge1_reference for sample in samples)),
        rouge_l_reference=mean(_known(sample.rouge_l_reference for sample in samples)),
        token_f1_reference=mean(_known(sample.token_f1_reference for sample in samples)),
        perplexity_ratio=median(_known(sample.perplexity_ratio for sample in samples)),
        first_token_kl=mean([sample.first_token_kl for sample in samples]),
        token_agreement=mean([sample.token_agreement for sample in samples]),
        prompt_tokens=mean([sample.prompt_tokens for sample in timed]),
        exact_prefix_tokens=mean([sample.exact_prefix_tokens for sample in timed]),
        reused_tokens=mean([sample.reused_tokens for sample in timed]),
        computed_tokens=mean([sample.computed_tokens for sample in timed]),
        fires=sum(sample.reused_tokens > 0 for sample in samples),
        outcomes=dict(sorted(outcomes.items())),
        scored_perplexity=mean(_known(sample.scored_perplexity for sample in samples)),
        judge_score=mean(_known(sample.judge_score for sample in samples)),
        judge_failures=sum(sample.judge_error is not None for sample in samples),
    )


def _outcome(sample: Sample) -> str:
    return f"{sample.outcome} ({sample.reason})" if sample.reason else str(sample.outcome)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
