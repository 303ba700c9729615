"""Answers and where their KV came from; samples, which compare them with cold's; lines, which sum up samples."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from validation import metrics
from validation.arms import Arm
from validation.cases import Case, Expectation, grouped
from validation.metrics import NonInferiority


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Where a prompt's tokens came from, and how the request ended for the connector; mostly as in the audit log.

    Tokens: `exact_prefix_` in the engine's own exact prefix, `offered_` in the plan's spans, which are `reused_` or
    `recomputed_`; `sampled_`, then `checked_`: compared with the donor's KV. `sampled_deviation`: the sample's mean.
    `largest_kept`: largest deviation of what is reused. `generation`: highest of the plan's donors. `spans`: (start,
    length) in the prompt."""

    exact_prefix_tokens: int = 0
    offered_tokens: int = 0
    sampled_tokens: int = 0
    checked_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    sampled_deviation: float = 0.0
    largest_kept: float = 0.0
    outcome: str | None = None
    reason: str | None = None
    generation: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the KV is a cold run's: no donor KV was placed, or a check rejected all of it."""
        is_checked = self.checked_tokens or self.sampled_tokens
        return not self.reused_tokens and bool(is_checked or not self.offered_tokens)

    @classmethod
    def of(cls, event: Mapping[str, Any], plan: Mapping[str, Any] | None) -> "Reuse":
        """Read the audit events `request_settled` and, if a plan was carried out, `plan_dispatched`."""
        # What was not compared is None in the log.
        known: dict[str, Any] = {x.name: event[x.name] or x.default for x in fields(cls) if x.name in event}
        known["recomputed_tokens"] = event["offered_tokens"] - event["reused_tokens"]
        known["generation"] = 0 if plan is None else plan["generation"]
        return cls(**known, spans=() if plan is None else tuple((start, n) for _, _, start, n in plan["spans"]))


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer, or the likeliest token at each position of a forced answer, from `logits` [tokens, vocabulary].
    `loss`: mean negative log-likelihood of a forced answer, nats a token. `answer_kl`: see Sample."""

    request_id: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    logits: torch.Tensor
    loss: float | None
    ttft_s: float | None
    reuse: Reuse
    answer_kl: float | None = None

    def with_first_row(self) -> "Answer":
        """Return the answer with the logits of its first token only, on the host."""
        return replace(self, logits=self.logits[:1].float().cpu().clone())


def is_known(exact_match: float | None, loss: float | None, vocabulary: int) -> bool:
    """Return whether a model knows a family, by its cold answers; on others, reuse shows nothing.
    It gives half of the right answers, or a text's `loss`, in nats a token, is below a blind guess's."""
    if exact_match is not None:
        return exact_match >= 0.5
    return loss is None or loss < math.log(vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Reuse):
    """One arm's answer to one case beside cold's, times in seconds; None if the case does not define the figure.

    `computed_share`: tokens times layers that were computed, of those after the engine's own exact prefix.
    `expected_exact_tokens`: shared from position 0 on with a donor that this arm computed exactly. They are whole units
    of the engine, and the arm exact_prefix reuses them. `exact_match`: only if one answer is right.
    `follows_donor`: the answer is the wrong one of the donors' text. `*_cold`: against cold's answer.
    `loss` (nats a token) and `perplexity`: of the reference, in a timed run without one of cold's answer.
    `perplexity_ratio`: over cold's. `first_token_kl`: nats from cold's distribution. `speedup`: cold's TTFT over ours.
    `answer_kl`, if asked for: mean KL in nats from cold's distribution over the tokens of cold's own answer.
    `contains_reference`: the answer holds the words of the one right answer."""

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
    expected_exact_tokens: int
    computed_tokens: int
    computed_share: float
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
    answer_kl: float | None = None
    contains_reference: bool | None = None

    @property
    def is_right(self) -> bool:
        """Whether the answer holds the right one, in whatever words."""
        return bool(self.exact_match or self.contains_reference)

    @property
    def may_reuse(self) -> bool:
        return self.expects in (Expectation.REUSE.value, Expectation.ANY.value)


def sample_of(arm: Arm, case: Case, ours: Answer, cold: Answer, layers: int, repeat: int = 0, exact: int = 0) -> Sample:
    """Return one arm's answer beside cold's; `layers` are the model's, `exact` the sample's `expected_exact_tokens`."""
    reuse, reference = ours.reuse, case.reference
    # After a sample only tokens that were compared ran in the lowest layers.
    reused, compared = reuse.reused_tokens, reuse.sampled_tokens + reuse.checked_tokens
    run_below = min(reused, compared) if reuse.sampled_tokens else reused
    moved = reused - run_below * arm.full_layers / layers
    after_prefix = ours.prompt_tokens - reuse.exact_prefix_tokens
    perplexity, colds = (None if each.loss is None else metrics.perplexity(each.loss) for each in (ours, cold))
    is_timed = case.is_timed and ours.ttft_s is not None and cold.ttft_s is not None
    is_known = bool(case.known_answer and reference)
    return Sample(
        **{each.name: getattr(reuse, each.name) for each in fields(Reuse)},
        case_id=case.id,
        **{name: getattr(case, name) for name in ("workload", "size", "group", "reference")},
        **{name: getattr(ours, name) for name in ("ttft_s", "prompt_tokens", "loss", "answer_kl")},
        expects=case.expects.value,
        arm=arm.name,
        repeat=repeat,
        timed=is_timed,
        answer=ours.text,
        speedup=cold.ttft_s / ours.ttft_s if is_timed and cold.ttft_s and ours.ttft_s else None,
        answer_tokens=len(ours.tokens),
        expected_exact_tokens=exact,
        computed_tokens=after_prefix - reused,
        computed_share=1.0 - moved / max(1, after_prefix),
        exact_match=metrics.exact_match(ours.text, str(reference)) if is_known else None,
        contains_reference=metrics.contains(ours.text, str(reference)) if is_known else None,
        follows_donor=None if case.donor_answer is None else metrics.contains(ours.text, case.donor_answer),
        **_closeness(ours.text, cold.text, "cold"),
        **_closeness(ours.text, None if reference is None else reference.strip(), "reference"),
        perplexity=perplexity,
        perplexity_ratio=None if perplexity is None or colds is None else perplexity / colds,
        first_token_kl=metrics.kl_divergence(cold.logits[0], ours.logits[0]),
        token_agreement=metrics.token_agreement(ours.tokens, cold.tokens),
    )


def _closeness(answer: str, other: str | None, name: str) -> dict[str, Any]:
    scores = (None, None, None) if other is None else metrics.closeness(answer, other)
    return dict(zip((f"rouge1_{name}", f"rouge_l_{name}", f"token_f1_{name}"), scores, strict=True))


@dataclass(frozen=True, slots=True)
class Line:
    """One family under one arm: means over samples, sums of tokens, and the highest `largest_kept`.

    `loss`: of the references, nats a token. `ppl_ratio`: exp of the mean difference of losses.
    Bounds: exact match minus cold's, and cold's loss minus the arm's. `reused_share`: of offered tokens.
    `answer_kl`: mean, and its 95 % quantile. `changed`: share of answers of which a token is not cold's.
    `contains`: share of answers that hold the right one."""

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
    first_token_kl: float
    fires: int
    offered: int
    reused: int
    reused_share: float | None
    computed_share: float
    largest_kept: float
    answer_kl: float | None
    answer_kl_q95: float | None
    changed: float
    contains: float | None

    @property
    def bounds(self) -> list[NonInferiority]:
        """The comparisons with cold that exist."""
        return [bound for bound in (self.exact_match_bound, self.loss_bound) if bound is not None]

    @property
    def holds(self) -> bool:
        """True when no score is inferior to cold's. Where answers are right or wrong, losses decide nothing."""
        return all(bound.holds for bound in self.bounds[:1])


# Figures of a line that are means of the samples' own.
_MEANS = ("exact_match", "follows_donor", "loss", "answer_kl", "first_token_kl", "computed_share")


def lines_of(samples: Iterable[Sample], cold: Mapping[str, Sample], seed: int = 0) -> list[Line]:
    """Return one line for each family and arm, in order of appearance; `cold` is by case id, `seed` the bootstrap's."""
    by_key = grouped(samples, lambda sample: (sample.workload, sample.arm))
    return [_line_of(*key, chosen, cold, seed) for key, chosen in by_key.items()]


def _line_of(family: str, arm: str, samples: Sequence[Sample], cold: Mapping[str, Sample], seed: int) -> Line:
    def bound(name: str, sign: float = 1.0) -> NonInferiority | None:
        pairs = ((getattr(each, name), getattr(cold[each.case_id], name), each.group) for each in samples)
        found = [(sign * (ours - other), group) for ours, other, group in pairs if None not in (ours, other)]
        return metrics.non_inferiority([each for each, _ in found], [group for _, group in found], seed=seed)

    figures: dict[str, Any] = {name: metrics.mean(getattr(each, name) for each in samples) for name in _MEANS}
    offered, reused = sum(each.offered_tokens for each in samples), sum(each.reused_tokens for each in samples)
    loss = bound("loss", -1.0)
    return Line(
        family=family,
        arm=arm,
        samples=len(samples),
        groups=len({sample.group for sample in samples}),
        exact_match_bound=bound("exact_match"),
        ppl_ratio=None if loss is None else math.exp(-loss.difference),
        loss_bound=loss,
        **figures,
        fires=sum(sample.reused_tokens > 0 for sample in samples),
        offered=offered,
        reused=reused,
        reused_share=reused / offered if offered else None,
        largest_kept=max(each.largest_kept for each in samples),
        answer_kl_q95=metrics.percentile((sample.answer_kl for sample in samples), 0.95),
        changed=sum(sample.token_agreement < 1.0 for sample in samples) / len(samples),
        contains=metrics.mean(sample.contains_reference for sample in samples),
    )
