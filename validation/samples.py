"""A sample: what one arm did with one case, measured against cold on the same case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Times in seconds, divergences in nats; None where the case does not define the figure.

    `speedup` is cold's TTFT over this arm's on the same case and is given for timed cases only. Scores `*_cold`
    compare with cold's answer, `*_reference` with the case's reference. `perplexity` is that of the reference, or of
    cold's own answer where there is none, under this arm's KV; `perplexity_ratio` divides it by cold's.
    `expected_exact_tokens`: what the case's donors, as far as this arm computed them exactly, share with the prompt
    from position 0 on and the exact-prefix arm reuses.
    """

    case_id: str
    workload: str
    size: str
    expects: str
    arm: str
    repeat: int
    timed: bool
    answer: str
    reference: str | None
    ttft_s: float
    speedup: float | None
    prompt_tokens: int
    answer_tokens: int
    exact_prefix_tokens: int
    expected_exact_tokens: int
    reused_tokens: int
    computed_tokens: int
    outcome: str | None
    reason: str | None
    exact_match: bool | None
    rouge1_cold: float
    rouge_l_cold: float
    token_f1_cold: float
    rouge1_reference: float | None
    rouge_l_reference: float | None
    token_f1_reference: float | None
    perplexity: float | None
    perplexity_ratio: float | None
    first_token_kl: float
    token_agreement: float
    scored_perplexity: float | None = None
    judge_score: float | None = None
    judge_error: str | None = None
