"""Answers and samples that several tests build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from validation.quality.samples import QualitySample

if TYPE_CHECKING:
    from collections.abc import Callable

_SAMPLE: dict[str, Any] = {
    "case_id": "case",
    "family": "reordered",
    "group": "group",
    "arm": "verified",
    "answer": "42",
    "reference": "42",
    "exact_match": True,
    "follows_donor": None,
    "loss": None,
    "agreement": 1.0,
    "first_token_kl": 0.0,
    "prompt_tokens": 1_000,
    "cached": 0,
    "offered": 900,
    "checked": 900,
    "reused": 880,
    "recomputed": 20,
    "largest_kept": 0.1,
    "computed_share": 0.4,
    "outcome": "backend_materialized_reuse",
    "reason": None,
}


@pytest.fixture(scope="session")
def make_quality_sample() -> Callable[..., QualitySample]:
    """Builds a sample of a verified prompt; keywords change its fields."""
    return lambda **changes: QualitySample(**(_SAMPLE | changes))
