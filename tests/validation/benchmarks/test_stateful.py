"""The benchmark of random lives counts what happened, and stops counting where a byte is stale."""

from __future__ import annotations

import json

import pytest

from engine_wrapper.publication import PublicationGuard
from validation.benchmarks import random_life, stateful


@pytest.fixture(autouse=True)
def two_cases(monkeypatch):
    monkeypatch.setattr(stateful, "CASES", random_life.CASES[-2:])


def clean_steps(folder, steps):
    stateful.main(["--steps", str(steps), "--json", str(folder)])
    (row,) = json.loads((folder / "stateful.json").read_text())
    assert (row["name"], row["goal"]) == ("stateful_steps_clean", None)
    assert "admissions" in row["baseline"]
    return row["value"]


def test_every_step_of_a_sound_engine_is_clean(tmp_path):
    assert clean_steps(tmp_path, 101) == 101


def test_approximate_blocks_in_the_prefix_cache_end_the_count(tmp_path, monkeypatch):
    monkeypatch.setattr(PublicationGuard, "publishable", lambda self, request_id, tokens: tokens)
    assert clean_steps(tmp_path, 600) < 600


def test_a_step_for_each_engine_is_the_least(capsys):
    with pytest.raises(SystemExit):
        stateful.main(["--steps", "1"])
    assert "--steps 1 is too few" in capsys.readouterr().err
