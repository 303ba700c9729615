"""How close an answer is to another, and how close one model's predictions are to another's."""

from __future__ import annotations

import functools
import math
import re
import string
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from rouge_score import rouge_scorer

if TYPE_CHECKING:
    from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_words(text: str) -> list[str]:
    """Words of `text` without case, punctuation and articles: SQuAD's evaluation script (Rajpurkar et al. 2016)."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, reference: str) -> bool:
    """True when both have the same normalised words."""
    return normalised_words(answer) == normalised_words(reference)


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over normalised words, 0..1 (SQuAD); two empty texts agree."""
    ours, theirs = normalised_words(answer), normalised_words(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def rouge_f1(answer: str, reference: str) -> tuple[float, float]:
    """ROUGE-1 and ROUGE-L F1, 0..1 (Lin 2004, google-research/rouge); equal texts agree even without a word."""
    if answer == reference:
        return 1.0, 1.0
    scores = _scorer().score(reference, answer)
    return float(scores["rouge1"].fmeasure), float(scores["rougeL"].fmeasure)


def token_agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions with the same token, 0..1; a position that only one of them has does not agree."""
    if not tokens and not reference:
        return 1.0
    equal = sum(ours == theirs for ours, theirs in zip(tokens, reference, strict=False))
    return equal / max(len(tokens), len(reference))


def perplexity(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood of `tokens`; row i of `logits` [n, vocab] predicts token i.

    Raises ValueError when there is no token, or not one row for each.
    """
    if not tokens or logits.shape[0] != len(tokens):
        raise ValueError(f"Perplexity needs one row of logits a token, not {logits.shape[0]} for {len(tokens)}.")
    target = torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)
    loss = torch.nn.functional.cross_entropy(logits.double(), target)
    # Beyond e^700 a double overflows; such a value means "hopeless" either way.
    return math.exp(min(float(loss), 700.0))


def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> float:
    """KL(reference || other) in nats between two rows of logits [vocab]; never below 0."""
    reference = torch.log_softmax(reference_logits.double(), dim=-1)
    other = torch.log_softmax(logits.double(), dim=-1)
    return max(0.0, float((reference.exp() * (reference - other)).sum()))


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear interpolation between order statistics; None of nothing. Raises ValueError for a share outside 0..1."""
    return float(np.quantile(values, share)) if values else None


def median(values: Sequence[float]) -> float | None:
    return percentile(values, 0.5)


@functools.cache
def _scorer() -> rouge_scorer.RougeScorer:
    return rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=False)
