"""The embedding benchmark drives a real scheduler, with and without an embedder."""

from __future__ import annotations

import pytest

from benchmarks.lookup import embedding
from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import tokenizer_file
from semblend_trt.semantic.sentence_model import sentence_model
from validation.results import Results


def test_the_row_of_a_scheduler_call_compares_on_with_off(monkeypatch):
    monkeypatch.setattr(embedding, "CALLS", 10)
    monkeypatch.setattr(embedding, "PAUSE_S", 0.0)
    monkeypatch.setenv("SEMBLEND_EMBEDDER", "off")  # is put back when the test ends
    results = Results()
    embedding.measure_scheduler(results)
    (row,) = results.rows
    assert (row.name, row.goal) == ("scheduler_extra_ms", 0.1)
    assert row.value >= 0
    assert "median of 10 look-ups of 8,192 tokens" in row.baseline


def test_a_text_has_as_many_tokens_as_asked_for():
    try:
        folder = sentence_model(None, "onnx", "onnx").folder
    except ConfigurationError as error:
        pytest.skip(str(error))
    encoding = tokenizer_file(folder).encode(embedding.text_of_tokens(300), add_special_tokens=False)
    assert abs(len(encoding.ids) - 300) <= 3
