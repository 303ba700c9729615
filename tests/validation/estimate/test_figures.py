"""The sums over prompts, and which runs count as one document."""

import numpy as np
import pytest

from semblend_trt.plan import PlanSpan
from validation.estimate import figures as module
from validation.estimate.figures import Documents, Figures
from validation.estimate.latency import LatencyModel, Observation
from validation.estimate.serving import Served, donor_name


def text(seed, tokens=200):
    return np.random.default_rng(seed).integers(0, 1_000, tokens).astype(np.int32)


def span(start, length, line=1, *, exact=False):
    return PlanSpan(donor_name(line, 1), start if exact else start + 5, start, length, exact=exact)


def test_shares_count_every_token_once():
    figures = Figures()
    figures.add(1, "a", text(1), Served(200, 0, 0, (), "no_donor_match"))
    spans = (span(40, 40, exact=True), span(100, 70), span(175, 20))
    figures.add(2, "b", text(1), Served(200, 60, 40, spans, None))
    found = figures.to_dict()
    assert found["shares"] == {"prefix_cache": 60 / 400, "added": 110 / 400, "together": 170 / 400}
    assert [(each["from_tokens"], each["runs"], each["tokens"]) for each in found["moved_runs"]] == [(64, 1, 70)]
    assert (found["prompts"], found["tokens"], found["namespaces"]) == (2, 400, 2)
    assert found["prompts_without_donors"] == {"no_donor_match": 1}


def test_times_are_those_of_the_model():
    model = LatencyModel.fitted([Observation(3.0 + n, n, 0) for n in (10, 20, 100, 200, 300)], "a test")
    figures = Figures()
    figures.add(1, "", text(1), Served(200, 50, 30, (span(30, 100),), None))
    times = figures.expected_ttft(model)
    assert times["cold"] == pytest.approx({"mean_ms": 203, "p50_ms": 203, "p95_ms": 203})
    assert times["prefix_cache"]["mean_ms"] == pytest.approx(153)
    assert times["with_donors"]["mean_ms"] == pytest.approx(73)
    assert times["extrapolated_share"] == 1.0


def test_runs_of_one_text_are_one_document_wherever_they_stand():
    documents, one, other = Documents(), text(1), text(2)
    documents.add(9, span(50, 200, line=4), np.concatenate([text(3, 50), one]))
    documents.add(12, span(10, 200, line=9), np.concatenate([text(4, 10), one]))
    documents.add(12, span(0, 200, line=7), other)
    first, second = documents.most_reused(5)
    assert (first.uses, first.tokens, first.reused_tokens, first.first_lines) == (2, 200, 400, [4, 9, 12])
    assert (second.uses, second.first_lines) == (1, [7, 12])
    assert first.name != second.name
    assert [each.name for each in documents.most_reused(1)] == [first.name]


def test_of_too_many_documents_the_least_reused_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 10)
    documents = Documents()
    for seed in range(100):
        for _ in range(3 if seed == 0 else 1):
            documents.add(seed + 2, span(0, 200), text(seed))
    left = documents.most_reused(1_000)
    assert len(left) <= 10
    assert (left[0].uses, left[0].first_lines[-1]) == (3, 2)
