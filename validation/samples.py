"""Samples, an arm's answer compared with cold's; and lines, all samples of one family and arm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from validation import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from validation.arms import Arm
    from validation.cases import Case
    from validation.metrics import NonInferiority
    from validation.serving import Answer

# A family whose cold exact match is lower shows nothing.
MIN_COLD_SCORE = 0.5


def is_known(exact_match: float | None, loss: float | None, vocabulary: int) -> bool:
    """Whether a model knows a family, by the means of its cold answers; whatever reuse does to another shows nothing.

    Where one answer is right, it gives that often enough. A text's `loss`, in nats a token, is below that of a blind
    guess among the `vocabulary`'s tokens.
    """
    if exact_match is not None:
        return exact_match >= MIN_COLD_SCORE
    return loss is None or loss < math.log(vocabulary)


@dataclass(frozen=True, slots=True)
class Sample:
    """One arm's answer to one case, compared with cold's; None where the case does not define the figure.

    Token counts, `generation` and `spans` are as in `Reuse`. `computed_share`: tokens times layers that were computed,
    of those behind the engine's own exact prefix. `expected_exact_tokens`: tokens that the prompt shares from position
    0 on with a donor that this arm computed exactly, in whole units of the engine, and that the arm exact_prefix
    reuses. `exact_match`: only where one answer is right. `follows_donor`: the answer is the wrong one of the
    donors' text. Scores `*_cold` compare with cold's answer, `*_reference` with the reference. `loss` (nats a
    token) and `perplexity` are of the reference, in a timed run without one of cold's answer; `perplexity_ratio` is
    over cold's. `first_token_kl`: nats from cold's distribution. `speedup`: cold's TTFT over this arm's, of timed
    cases; times are in seconds. `likelihood`, 0 to 1, where it was asked for: the probability of the right answer,
    in the tokens in which cold gave it; where many texts are right, of the reference by token (geometric mean).
    """

    case_id: str
    workload: str
    size: str
    group: str
    expects: str
    arm: str
    repeat: int
    timed: bool
    answer: str
    reference: str | None
    ttft_s: float | None
    speedup: float | None
    prompt_tokens: int
    answer_tokens: int
    exact_prefix_tokens: int
    expected_exact_tokens: int
    offered_tokens: int
    sampled_tokens: int
    checked_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    computed_share: float
    largest_kept: float
    outcome: str | None
    reason: str | None
    exact_match: bool | None
    follows_donor: bool | None
    rouge1_cold: float
    rouge_l_cold: float
    token_f1_cold: float
    rouge1_reference: float | None
    rouge_l_reference: float | None
    token_f1_reference: float | None
    loss: float | None
    perplexity: float | None
    perplexity_ratio: float | None
    first_token_kl: float
    token_agreement: float
    scored_perplexity: float | None = None
    judge_score: float | None = None
    judge_error: str | None = None
    likelihood: float | None = None
    generation: int = 0
    spans: tuple[tuple[int, int], ...] = ()


def sample_of(
    arm: Arm, case: Case, ours: Answer, cold: Answer, num_layers: int, repeat: int = 0, expected_exact_tokens: int = 0
) -> Sample:
    """One arm's answer beside cold's; `num_layers` are the model's, for the rest see Sample."""
    reuse, reference = ours.reuse, case.reference
    uncached = max(1, ours.prompt_tokens - reuse.cached)
    # Behind a sample only tokens that were compared ran in the lowest layers.
    run_below = min(reuse.reused, reuse.sampled + reuse.checked) if reuse.sampled else reuse.reused
    rouge1_cold, rouge_l_cold, token_f1_cold = metrics.closeness(ours.text, cold.text)
    known = (None, None, None) if reference is None else metrics.closeness(ours.text, reference.strip())
    perplexity = None if ours.loss is None else metrics.perplexity(ours.loss)
    is_timed = case.is_timed and ours.ttft_s is not None and cold.ttft_s is not None
    return Sample(
        case_id=case.id,
        workload=case.workload,
        size=case.size,
        group=case.group,
        expects=case.expects.value,
        arm=arm.name,
        repeat=repeat,
        timed=is_timed,
        answer=ours.text,
        reference=reference,
        ttft_s=ours.ttft_s,
        speedup=cold.ttft_s / ours.ttft_s if is_timed and cold.ttft_s and ours.ttft_s else None,
        prompt_tokens=ours.prompt_tokens,
        answer_tokens=len(ours.tokens),
        exact_prefix_tokens=reuse.cached,
        expected_exact_tokens=expected_exact_tokens,
        offered_tokens=reuse.offered,
        sampled_tokens=reuse.sampled,
        checked_tokens=reuse.checked,
        reused_tokens=reuse.reused,
        recomputed_tokens=reuse.recomputed,
        computed_tokens=ours.computed_tokens,
        computed_share=1.0 - (reuse.reused - run_below * arm.full_layers / num_layers) / uncached,
        largest_kept=reuse.largest_kept,
        outcome=reuse.outcome,
        reason=reuse.reason,
        exact_match=metrics.exact_match(ours.text, reference) if case.known_answer and reference else None,
        follows_donor=None if case.donor_answer is None else metrics.exact_match(ours.text, case.donor_answer),
        rouge1_cold=rouge1_cold,
        rouge_l_cold=rouge_l_cold,
        token_f1_cold=token_f1_cold,
        rouge1_reference=known[0],
        rouge_l_reference=known[1],
        token_f1_reference=known[2],
        loss=ours.loss,
        perplexity=perplexity,
        perplexity_ratio=None
        if perplexity is None or cold.loss is None
        else perplexity / metrics.perplexity(cold.loss),
        first_token_kl=metrics.kl_divergence(cold.logits[0], ours.logits[0]),
        token_agreement=metrics.token_agreement(ours.tokens, cold.tokens),
        likelihood=ours.likelihood,
        generation=reuse.generation,
        spans=reuse.spans,
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One family under one arm: means over samples, and sums of tokens.

    `loss`: of the references, nats a token. `ppl_ratio`: exp of the mean difference of losses. `follows_donor`: share
    of answers that are the donors' wrong one.
    The bounds compare with cold: exact match minus cold's, and cold's loss minus the arm's. `reused_share`: reused over
    offered tokens. `largest_kept` and `generation`: the maxima over samples.
    """

    family: str
    arm: str
    samples: int
    groups: int
    exact_match: float | None
    exact_match_bound: NonInferiority | None
    follows_donor: float | None
    loss: float | None
    ppl_ratio: float | None
    loss_bound: NonInferiority | None
    agreement: float
    first_token_kl: float
    fires: int
    offered: int
    sampled: int
    checked: int
    reused: int
    recomputed: int
    reused_share: float | None
    computed_share: float
    largest_kept: float
    generation: int

    @property
    def bounds(self) -> list[NonInferiority]:
        """The comparisons with cold that there are."""
        return [bound for bound in (self.exact_match_bound, self.loss_bound) if bound is not None]

    @property
    def holds(self) -> bool:
        """True when no score is inferior to cold's."""
        return all(bound.holds for bound in self.bounds)


def lines_of(
    samples: Iterable[Sample], cold: Mapping[str, Sample], seed: int = 0, *, is_bounded: bool = True
) -> list[Line]:
    """One line for each family and arm, in the order in which they appear; `cold` by case id, the rest as `line_of`."""
    by_key: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        by_key.setdefault((sample.workload, sample.arm), []).append(sample)
    return [line_of(family, arm, chosen, cold, seed, is_bounded=is_bounded) for (family, arm), chosen in by_key.items()]


def line_of(
    family: str,
    arm: str,
    samples: Sequence[Sample],
    cold: Mapping[str, Sample],
    seed: int = 0,
    *,
    is_bounded: bool = True,
) -> Line:
    """One line of the given samples, of which there is at least one; without what needs bounds unless `is_bounded`."""
    exact = loss = None
    if is_bounded:
        exact = _bound(samples, cold, lambda sample: sample.exact_match, seed)
        loss = _bound(samples, cold, lambda sample: None if sample.loss is None else -sample.loss, seed)
    offered, sampled, checked, reused, recomputed = (
        sum(getattr(sample, f"{name}_tokens") for sample in samples)
        for name in ("offered", "sampled", "checked", "reused", "recomputed")
    )
    agreement, first_token_kl, computed_share = (
        math.fsum(getattr(sample, name) for sample in samples) / len(samples)
        for name in ("token_agreement", "first_token_kl", "computed_share")
    )
    return Line(
        family=family,
        arm=arm,
        samples=len(samples),
        groups=len({sample.group for sample in samples}),
        exact_match=metrics.mean(sample.exact_match for sample in samples),
        exact_match_bound=exact,
        follows_donor=metrics.mean(sample.follows_donor for sample in samples),
        loss=metrics.mean(sample.loss for sample in samples),
        ppl_ratio=None if loss is None else math.exp(-loss.difference),
        loss_bound=loss,
        agreement=agreement,
        first_token_kl=first_token_kl,
        fires=sum(sample.reused_tokens > 0 for sample in samples),
        offered=offered,
        sampled=sampled,
        checked=checked,
        reused=reused,
        recomputed=recomputed,
        reused_share=reused / offered if offered else None,
        computed_share=computed_share,
        largest_kept=max(sample.largest_kept for sample in samples),
        generation=max(sample.generation for sample in samples),
    )


def _bound(
    samples: Sequence[Sample], cold: Mapping[str, Sample], score: Callable[[Sample], float | None], seed: int
) -> NonInferiority | None:
    differences, clusters = [], []
    for sample in samples:
        ours, theirs = score(sample), score(cold[sample.case_id])
        if ours is not None and theirs is not None:
            differences.append(float(ours) - float(theirs))
            clusters.append(sample.group)
    return metrics.non_inferiority(differences, clusters, seed=seed)
