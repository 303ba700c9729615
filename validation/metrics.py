"""Measure how close two answers or predictions are, and whether an arm's scores are non-inferior to cold's."""

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_words(text: str) -> list[str]:
    """Return words without case, punctuation and articles, as SQuAD's evaluation script (Rajpurkar et al. 2016)."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, reference: str) -> bool:
    """Return whether both have the same normalised words."""
    return normalised_words(answer) == normalised_words(reference)


def contains(answer: str, part: str) -> bool:
    """Return whether the normalised words of `part`, at least one, follow each other in those of `answer`."""
    ours, theirs = (f" {' '.join(normalised_words(text))} " for text in (answer, part))
    return bool(theirs.strip()) and theirs in ours


def token_f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall over normalised words, 0..1 (SQuAD); 1 for two empty texts."""
    ours, theirs = normalised_words(answer), normalised_words(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def closeness(answer: str, reference: str) -> tuple[float, float, float]:
    """Return ROUGE-1 F1, ROUGE-L F1 (Lin 2004, google-research/rouge) and token F1, 0..1; equal texts have 1."""
    if answer == reference:
        return 1.0, 1.0, 1.0
    from rouge_score.rouge_scorer import RougeScorer  # it loads nltk, in a second

    scores = RougeScorer(["rouge1", "rougeL"]).score(reference, answer)
    return float(scores["rouge1"].fmeasure), float(scores["rougeL"].fmeasure), token_f1(answer, reference)


def token_agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Return the share of positions with the same token, 0..1; one that only one of them has does not agree."""
    if not tokens and not reference:
        return 1.0
    equal = sum(ours == theirs for ours, theirs in zip(tokens, reference, strict=False))
    return equal / max(len(tokens), len(reference))


def loss(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of `tokens`, nats; row i of `logits` [n, vocabulary] predicts token i."""
    target = torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[: len(target)].double(), target))


def perplexity(nats: float) -> float:
    """Return exp of a loss, at most e^700: a double overflows beyond it."""
    return math.exp(min(nats, 700.0))


def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> float:
    """Return KL(reference || other) in nats between logits [..., vocabulary]; the mean over rows, never below 0."""
    reference = torch.log_softmax(reference_logits.double(), dim=-1)
    other = torch.log_softmax(logits.double(), dim=-1)
    return float((reference.exp() * (reference - other)).sum(dim=-1).clamp(min=0.0).mean())


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def percentile(values: Iterable[float | None], share: float) -> float | None:
    """Return quantile `share`, linearly interpolated, of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return float(np.quantile(known, share)) if known else None


def median(values: Iterable[float | None]) -> float | None:
    return percentile(values, 0.5)


# The score that an arm may lose.
MARGIN = 0.01
CONFIDENCE = 0.95
RESAMPLES = 9_999


@dataclass(frozen=True, slots=True)
class NonInferiority:
    """Mean difference of scores, arm minus cold, and its one-sided lower bound at CONFIDENCE, -inf with one group."""

    difference: float
    lower: float
    samples: int
    groups: int
    margin: float = MARGIN

    @property
    def holds(self) -> bool:
        """True when the arm is non-inferior: at CONFIDENCE it loses at most the margin."""
        return self.lower >= -self.margin

    def sentence(self) -> str:
        return (
            f"difference {self.difference:+.4f}, one-sided {CONFIDENCE:.0%} lower bound {self.lower:+.4f}; "
            f"{self.samples} prompts in {self.groups} groups"
        )


def non_inferiority(differences: Sequence[float], groups: Sequence[Hashable], seed: int = 0) -> NonInferiority | None:
    """Compare paired scores, arm minus cold, by a percentile bootstrap (Efron 1979) from `seed`; None without any.
    It resamples whole groups, since answers on the same documents are not independent. The mean is over prompts."""
    if not differences:
        return None
    from scipy.stats import DegenerateDataWarning, bootstrap  # loaded in a second

    # A resample's mean needs only the sum and the number of each group's values.
    index = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    members = [index[group] for group in groups]
    sums, counts = (np.bincount(members, weights=each).astype(np.float64) for each in (differences, None))
    lower = -math.inf
    with warnings.catch_warnings():
        # Every group alike: the bound is the difference itself.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        if len(sums) > 1:
            found = bootstrap(
                (sums, counts),
                lambda total, number, axis: total.sum(axis=axis) / number.sum(axis=axis),
                paired=True,
                vectorized=True,
                n_resamples=RESAMPLES,
                batch=1_000,
                confidence_level=CONFIDENCE,
                alternative="greater",
                method="percentile",
                rng=np.random.default_rng(seed),
            )
            lower = float(found.confidence_interval.low)
    return NonInferiority(float(np.mean(differences)), lower, len(differences), len(sums))
