"""Gates: figures of a run that decide its exit status."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, is_reusing
from validation.cases import Expectation
from validation.metrics import MARGIN, mean, median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.results import Better
    from validation.audit_log import AuditCounts
    from validation.exactness import Exactness
    from validation.samples import Sample

# Allowed beyond the difference of a second cold run.
MAX_EM_DROP = MARGIN
MAX_PERPLEXITY_RATIO = 1.0 + MARGIN
MAX_LOGIT_DIFFERENCE = 1e-4
# Nats by which a GPU's results of one computation may differ.
KL_ROUNDING = 1e-6
# Counts of the audit log that have a lower bound, and what each counts.
COUNTED = {
    "donor_registrations": "requests that became donors",
    "semantic_hits": "look-ups that found a donor",
    "materializations": "requests whose donors' KV was placed",
    "incremental_matched_tokens": "tokens promised beyond the engine's own prefix",
    "rope_corrections": "requests whose donors' keys were rotated",
}


@dataclass(frozen=True, slots=True)
class GateBounds:
    """The bounds that a user may set. Raises ConfigurationError for one that is out of range."""

    min_speedup: float = 1.05
    min_rouge1: float = 0.35
    min_token_f1: float = 0.10
    min_donor_registrations: int = 1
    min_semantic_hits: int = 1
    min_materializations: int = 1
    min_incremental_matched_tokens: int = 1
    min_rope_corrections: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            option = "--" + name.replace("_", "-")
            if name in ("min_rouge1", "min_token_f1"):
                if not 0.0 <= value <= 1.0:
                    raise ConfigurationError(f"{option} is {value}; the score lies between 0 and 1.")
            elif not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{option} is {value}; it must be a number of at least 0.")


@dataclass(frozen=True, slots=True)
class Gate:
    """`value` must be at least `bound` where `better` is "higher", at most `bound` where it is "lower".

    A gate without a sample to read has the `value` None; it is shown and does not fail.
    """

    name: str
    value: float | None
    bound: float
    better: Better
    reads: str

    @property
    def holds(self) -> bool:
        if self.value is None:
            return True
        return self.value >= self.bound if self.better == "higher" else self.value <= self.bound

    def sentence(self) -> str:
        relation = "at least" if self.better == "higher" else "at most"
        shown = "not measured" if self.value is None else f"{self.value:.6g}"
        return f"{self.name} is {shown}, {relation} {self.bound:g} is required ({self.reads})"


def gates_of(
    samples: Sequence[Sample],
    audit: AuditCounts,
    policy: str,
    bounds: GateBounds,
    exactness: Exactness | None,
) -> list[Gate]:
    """All gates of a run; `audit` is that of `policy`, `exactness` None where it was not measured."""
    reusing = [s for s in samples if s.arm == policy and Expectation(s.expects).may_reuse]
    where = f"arm {policy}, workloads in which reuse is expected"
    # The policy may lose what a second cold run loses, and the margin.
    floor = max(0.0, exact_match_drop(samples, COLD_AGAIN) or 0.0)
    least = max(1.0, perplexity_ratio(samples, COLD_AGAIN) or 1.0)
    rouge1, token_f1 = mean(s.rouge1_cold for s in reusing), mean(s.token_f1_cold for s in reusing)
    drop, ratio = exact_match_drop(samples, policy), perplexity_ratio(samples, policy)
    lost, more = f"cold minus {policy}, {where}", f"geometric mean over cold's, {where}"
    kept = "share of requests with an exact prefix that keep all of it, every reusing arm"
    log = f"audit log of arm {policy}"
    return [
        _at_least("speedup", median(s.speedup for s in reusing), bounds, f"median of TTFT ratios to cold, {where}"),
        _at_least("rouge1", rouge1, bounds, f"mean ROUGE-1 F1 against cold's answer, {where}"),
        _at_least("token_f1", token_f1, bounds, f"mean token F1 against cold's answer, {where}"),
        Gate("exact_match_drop", drop, floor + MAX_EM_DROP, "lower", f"{lost}; noise floor {floor:.4f}"),
        Gate("perplexity_ratio", ratio, least * MAX_PERPLEXITY_RATIO, "lower", f"{more}; noise floor {least:.4f}"),
        Gate("unrelated_fires", unrelated_fires(samples), 0, "lower", "requests with placed KV, every reusing arm"),
        Gate("exact_prefix_untouched", exact_prefix_untouched(samples), 1.0, "higher", kept),
        *(_at_least(name, getattr(audit, name), bounds, log) for name in COUNTED),
        _exactness_gate(exactness),
    ]


def _at_least(name: str, value: float | None, bounds: GateBounds, reads: str) -> Gate:
    return Gate(name, value, getattr(bounds, f"min_{name}"), "higher", reads)


def _exactness_gate(exactness: Exactness | None) -> Gate:
    name, reads = "wrapper_exactness", "largest difference of logits"
    if exactness is None:
        return Gate(name, None, MAX_LOGIT_DIFFERENCE, "lower", f"{reads}; float32 only")
    reads += f" from {exactness.against}"
    if exactness.noise:
        reads += f", whose own noise is {exactness.noise:.2g}"
    return Gate(name, exactness.difference, max(MAX_LOGIT_DIFFERENCE, exactness.noise), "lower", reads)


def perplexity_ratio(samples: Sequence[Sample], arm: str) -> float | None:
    """Geometric mean of the arm's perplexity over cold's, over cases in which reuse is expected."""
    found = mean(
        math.log(s.perplexity_ratio)
        for s in samples
        if s.arm == arm and s.perplexity_ratio and Expectation(s.expects).may_reuse
    )
    return None if found is None else math.exp(found)


def exact_match_drop(samples: Sequence[Sample], arm: str) -> float | None:
    """Cold's exact match minus the arm's, over cases with a known answer in which reuse is expected."""
    expected = [s for s in samples if Expectation(s.expects).may_reuse]
    cold, ours = exact_match(expected, COLD), exact_match(expected, arm)
    return None if cold is None or ours is None else cold - ours


def exact_match(samples: Sequence[Sample], arm: str) -> float | None:
    """The arm's share of right answers, of cases with a known one."""
    return mean(s.exact_match for s in samples if s.arm == arm)


def unrelated_fires(samples: Sequence[Sample]) -> int | None:
    """Requests of unrelated prompts for which KV was placed, in all reusing arms; None without such prompts."""
    unrelated = [s for s in samples if is_reusing(s.arm) and s.expects == Expectation.NONE.value]
    return sum(sample.reused_tokens > 0 for sample in unrelated) if unrelated else None


def exact_prefix_untouched(samples: Sequence[Sample]) -> float | None:
    """Share of requests that keep the exact prefix which their donors left in the engine; None without any.

    Kept means: at least `expected_exact_tokens` are the engine's own, and for exact repeats nothing is placed beside
    them and answer and first distribution are those of the exact-prefix arm.
    """
    exact = {(s.case_id, s.repeat): s for s in samples if s.arm == EXACT_PREFIX}
    return mean(
        _keeps(sample, exact[sample.case_id, sample.repeat])
        for sample in samples
        if is_reusing(sample.arm) and sample.expected_exact_tokens > 0
    )


def _keeps(sample: Sample, exact: Sample) -> bool:
    if sample.exact_prefix_tokens < sample.expected_exact_tokens:
        return False
    if sample.expects != Expectation.EXACT_PREFIX.value:
        return True
    same = sample.answer == exact.answer and sample.first_token_kl <= exact.first_token_kl + KL_ROUNDING
    return same and sample.reused_tokens == 0
