"""One answer beside cold's, as a sample, and the samples of one family and arm as a line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from validation import metrics
from validation.metrics import NonInferiority, non_inferiority
from validation.quality.answers import divergence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from validation.arms import Arm
    from validation.cases import Case
    from validation.quality.answers import Answer

# A family that the model cannot answer cold shows nothing by not getting worse.
MIN_COLD_SCORE = 0.5


@dataclass(frozen=True, slots=True)
class QualitySample:
    """`exact_match` where one answer is right, `loss` (nats a token of the reference) where a text was scored.
    `follows_donor`: the answer is the wrong one that the donors' text gives; None where they give none.

    `agreement`: share of positions with cold's token. `first_token_kl`: nats from cold. `computed_share`: tokens times
    layers that were computed, of those that the engine's own exact prefix leaves. Token counts as in `Reuse`.
    """

    case_id: str
    family: str
    group: str
    arm: str
    answer: str
    reference: str | None
    exact_match: bool | None
    follows_donor: bool | None
    loss: float | None
    agreement: float
    first_token_kl: float
    prompt_tokens: int
    cached: int
    offered: int
    checked: int
    reused: int
    recomputed: int
    largest_kept: float
    computed_share: float
    outcome: str | None
    reason: str | None


def samples_of(
    arm: Arm, cases: Sequence[Case], answers: Mapping[str, Answer], cold: Mapping[str, Answer], num_layers: int
) -> list[QualitySample]:
    """The arm's answers, each beside cold's; `num_layers` are the model's."""
    return [_sample(arm, case, answers[case.id], cold[case.id], num_layers) for case in cases]


def _sample(arm: Arm, case: Case, ours: Answer, cold: Answer, num_layers: int) -> QualitySample:
    reuse = ours.reuse
    uncached = max(1, ours.prompt_tokens - reuse.cached)
    known = case.reference if case.known_answer else None
    return QualitySample(
        case_id=case.id,
        family=case.workload,
        group=case.group,
        arm=arm.name,
        answer=ours.text,
        reference=case.reference,
        exact_match=None if known is None else metrics.exact_match(ours.text, known),
        follows_donor=None if case.donor_answer is None else metrics.exact_match(ours.text, case.donor_answer),
        loss=ours.loss,
        agreement=metrics.token_agreement(ours.tokens, cold.tokens),
        first_token_kl=divergence(cold.first, ours.first),
        prompt_tokens=ours.prompt_tokens,
        cached=reuse.cached,
        offered=reuse.offered,
        checked=reuse.checked,
        reused=reuse.reused,
        recomputed=reuse.recomputed,
        largest_kept=reuse.largest_kept,
        computed_share=1.0 - reuse.reused / uncached * (1.0 - arm.full_layers / num_layers),
        outcome=reuse.outcome,
        reason=reuse.reason,
    )


@dataclass(frozen=True, slots=True)
class QualityLine:
    """One family under one arm. Means over samples; `ppl_ratio` is exp of the mean difference of losses.
    `follows_donor`: share of the answers that are the donors' wrong one.

    `exact_match_bound` and `loss_bound` compare with cold: exact match minus cold's, and cold's loss minus the arm's.
    `reused_share`: reused over offered tokens; `largest_kept`: over all samples.
    """

    family: str
    arm: str
    samples: int
    groups: int
    exact_match: float | None
    exact_match_bound: NonInferiority | None
    follows_donor: float | None
    ppl_ratio: float | None
    loss_bound: NonInferiority | None
    agreement: float
    first_token_kl: float
    fires: int
    offered: int
    checked: int
    reused: int
    recomputed: int
    reused_share: float | None
    computed_share: float
    largest_kept: float

    @property
    def holds(self) -> bool:
        """True when nothing that was scored is inferior to cold's."""
        return all(bound.holds for bound in (self.exact_match_bound, self.loss_bound) if bound is not None)


def lines_of(samples: Sequence[QualitySample], cold: Mapping[str, QualitySample], seed: int = 0) -> list[QualityLine]:
    """One line for each family and arm, in the order in which they appear; `cold` by case id."""
    by_key: dict[tuple[str, str], list[QualitySample]] = {}
    for sample in samples:
        by_key.setdefault((sample.family, sample.arm), []).append(sample)
    return [line_of(family, arm, chosen, cold, seed) for (family, arm), chosen in by_key.items()]


def line_of(
    family: str, arm: str, samples: Sequence[QualitySample], cold: Mapping[str, QualitySample], seed: int = 0
) -> QualityLine:
    """One line of the given samples, whatever they are; raises ValueError without any."""
    if not samples:
        raise ValueError(f"There is no sample of {family} under {arm}.")
    matches = [float(sample.exact_match) for sample in samples if sample.exact_match is not None]
    exact = _bound(samples, cold, lambda sample: sample.exact_match, seed)
    loss = _bound(samples, cold, lambda sample: None if sample.loss is None else -sample.loss, seed)
    offered, reused = (sum(getattr(sample, name) for sample in samples) for name in ("offered", "reused"))
    number = len(samples)
    return QualityLine(
        family=family,
        arm=arm,
        samples=number,
        groups=len({sample.group for sample in samples}),
        exact_match=metrics.mean(matches),
        exact_match_bound=exact,
        follows_donor=metrics.mean([float(s.follows_donor) for s in samples if s.follows_donor is not None]),
        ppl_ratio=None if loss is None else math.exp(-loss.difference),
        loss_bound=loss,
        agreement=math.fsum(sample.agreement for sample in samples) / number,
        first_token_kl=math.fsum(sample.first_token_kl for sample in samples) / number,
        fires=sum(sample.reused > 0 for sample in samples),
        offered=offered,
        checked=sum(sample.checked for sample in samples),
        reused=reused,
        recomputed=sum(sample.recomputed for sample in samples),
        reused_share=reused / offered if offered else None,
        computed_share=math.fsum(sample.computed_share for sample in samples) / number,
        largest_kept=max(sample.largest_kept for sample in samples),
    )


def _bound(
    samples: Sequence[QualitySample],
    cold: Mapping[str, QualitySample],
    score: Callable[[QualitySample], float | None],
    seed: int,
) -> NonInferiority | None:
    differences, clusters = [], []
    for sample in samples:
        ours, theirs = score(sample), score(cold[sample.case_id])
        if ours is not None and theirs is not None:
            differences.append(float(ours) - float(theirs))
            clusters.append(sample.group)
    return non_inferiority(differences, clusters, seed=seed)
