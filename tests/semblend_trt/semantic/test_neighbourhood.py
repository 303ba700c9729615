"""The neighbourhood keeps step with the scheduler: donors come and go, reports name the nearest, nothing is reused."""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from semblend_trt.audit import AuditEvents
from semblend_trt.config import load_settings
from semblend_trt.connector.engine_namespace import tokenizer_folder
from semblend_trt.connector.requests import TrackedRequest
from semblend_trt.errors import ConfigurationError
from semblend_trt.metrics import metrics_for
from semblend_trt.outcome import Outcome, ReuseReport
from semblend_trt.semantic.neighbourhood import neighbourhood_for

WAIT = 60.0
MODEL = files("validation") / "assets" / "model"
COLD = ReuseReport(Outcome.COLD_FALLBACK.value, None)


class News:
    """Keeps what is passed on."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *rest: self.told.append((name, rest[0] if rest else None))


class Fixture:
    def __init__(self, path, refusal=None, model=MODEL, **overrides):
        self.path, self.news, self.registry = path, News(), CollectorRegistry()
        self.audit = AuditEvents(path)
        self.neighbourhood = neighbourhood_for(
            load_settings(**{"embedder": "static"} | overrides),
            refusal,
            partial(tokenizer_folder, SimpleNamespace(model=str(model))),
            self.audit,
            metrics_for(True, self.registry),
            self.news,
        )

    def hold(self, donor_id, tokens, key="space"):
        self.neighbourhood.intended(donor_id, SimpleNamespace(key=key), None)
        self.neighbourhood.held(donor_id, tokens, "host")

    def nearest(self, request_id, tokens, key="space"):
        self.neighbourhood.look_up(TrackedRequest(request_id, key, tokens, 0))
        assert self.neighbourhood.neighbours.settle(WAIT)
        return [each.donor_id for each in self.neighbourhood.report(request_id, COLD).nearest]

    def events(self):
        self.audit.close()
        lines = self.path.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == "neighbours"]

    def count(self, event):
        return self.registry.get_sample_value("semblend_neighbour_texts_total", {"event": event})


def prompt(seed, length=400):
    return np.random.default_rng(seed).integers(300, 5000, length, dtype=np.int32)


def test_near_donors_are_reported_written_and_counted(tmp_path):
    made = Fixture(tmp_path / "audit")
    made.hold("one", prompt(1))
    made.hold("two", prompt(2))
    made.hold("foreign", prompt(2), key="another salt")
    assert made.nearest(5, np.concatenate([prompt(9, 30), prompt(2)])) == ["two"]
    assert made.nearest(6, prompt(7)) == []
    report = made.neighbourhood.report(5, COLD)
    assert report.reused_tokens == 0
    assert "nearest" not in report.figures
    made.neighbourhood.close()
    near, none = made.events()
    assert (near["request_id"], [name for name, _ in near["nearest"]], none["nearest"]) == (5, ["two"], [])
    assert 0.6 <= near["nearest"][0][1] <= 1.0
    assert (made.count("donor_embedded"), made.count("request_embedded"), made.count("dropped")) == (3, 2, 0)
    assert made.registry.get_sample_value("semblend_neighbour_similarity_count") == 1


def test_donors_near_a_request_are_named_to_the_scheduler_once(tmp_path):
    made = Fixture(tmp_path / "audit")
    made.hold("one", prompt(1))
    made.nearest(5, prompt(7))
    assert made.neighbourhood.near_donors() == []
    made.nearest(6, prompt(1))
    assert [made.neighbourhood.near_donors() for _ in range(2)] == [["one"], []]
    made.neighbourhood.close()


def test_a_donor_that_is_gone_is_named_no_more(tmp_path):
    made = Fixture(tmp_path / "audit")
    made.hold("one", prompt(1))
    assert made.nearest(5, prompt(1)) == ["one"]
    made.neighbourhood.gone("one")
    assert made.neighbourhood.report(5, COLD).nearest == ()
    assert made.nearest(6, prompt(1)) == []
    made.neighbourhood.close()


def test_min_similarity_decides_what_is_near(tmp_path):
    mixed = np.concatenate([prompt(1), prompt(2)])
    for least, expected in ((0.2, ["one"]), (0.95, [])):
        made = Fixture(tmp_path / f"audit-{least}", min_similarity=least)
        made.hold("one", prompt(1))
        assert made.nearest(1, mixed) == expected
        made.neighbourhood.close()


def test_the_news_reaches_the_fleet_with_and_without_an_embedder(tmp_path):
    for kind in ("off", "static"):
        made = Fixture(tmp_path / kind, embedder=kind)
        made.hold("one", prompt(1))
        made.neighbourhood.moved("one", "device")
        made.neighbourhood.gone("one")
        made.neighbourhood.close()
        assert made.news.told == [
            ("intended", "one"),
            ("held", "one"),
            ("moved", "one"),
            ("gone", "one"),
            ("close", None),
        ]


@pytest.mark.parametrize(
    ("refusal", "overrides"), [(None, {"embedder": "off"}), (None, {"enabled": False}), ("policy_off", {})]
)
def test_no_thread_runs_where_nothing_can_be_reported(tmp_path, refusal, overrides):
    made = Fixture(tmp_path / "audit", refusal=refusal, **overrides)
    assert made.neighbourhood.neighbours is None
    made.neighbourhood.look_up(TrackedRequest(1, "space", prompt(1), 0))
    assert made.neighbourhood.report(1, COLD) is COLD
    made.neighbourhood.close()


@pytest.mark.parametrize("model", ["no-such-org/no-such-model", "empty"])
def test_a_model_without_a_tokenizer_is_served_without_neighbours(tmp_path, model):
    (tmp_path / "empty").mkdir()
    made = Fixture(tmp_path / "audit", model=tmp_path / "empty" if model == "empty" else model)
    made.hold("one", prompt(1))
    assert made.nearest(1, prompt(1)) == []
    assert made.neighbourhood.neighbours.refusal is not None
    made.neighbourhood.close()


@pytest.mark.parametrize(("name", "value"), [("embedder", "word2vec"), ("min_similarity", "1.5")])
def test_a_wrong_setting_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(f"SEMBLEND_{name.upper()}", value)
    with pytest.raises(ConfigurationError, match=f"SEMBLEND_{name.upper()} is '{value}'"):
        load_settings()


def test_settings_name_every_embedder(monkeypatch):
    for kind in ("off", "static", "jaccard", "minilm", "onnx", "onnx_gpu"):
        monkeypatch.setenv("SEMBLEND_EMBEDDER", kind)
        assert load_settings().embedder.value == kind
    monkeypatch.delenv("SEMBLEND_EMBEDDER")
    assert load_settings().embedder.value == "off"
    assert load_settings().embedder_model is None
