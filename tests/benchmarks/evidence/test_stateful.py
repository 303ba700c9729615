"""The benchmark of random lives counts what happened, and stops counting where a byte is stale or a block is lost."""

from __future__ import annotations

import pytest

from benchmarks.evidence import stateful
from engine_wrapper.embedded.block_manager import BlockManager
from semblend_trt.donors.host_tier import HostKv
from semblend_trt.runtime import ActivePlans
from semblend_trt.transfer.save import DonorSaver
from tests.benchmarks.dry_runs import dry_rows


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    monkeypatch.setattr(stateful, "CASES", stateful.CASES[-2:])
    habits = [case for case in stateful.HABIT_CASES if case.name in ("1.2-v1-overlap-rough", "main-v1-rough")]
    monkeypatch.setattr(stateful, "HABIT_CASES", habits)


def lived(folder, steps):
    """The rows' values by name, of twice the steps that each of the four engines takes."""
    rows = dry_rows(stateful, folder, "--steps", str(steps))
    assert all("admissions" in row.baseline for row in rows.values())
    return {name: row.value for name, row in rows.items()}


def test_every_step_of_a_sound_engine_is_clean(tmp_path):
    values = lived(tmp_path, 101)
    assert values.pop("stateful_hits") > 0
    assert values == {
        "stateful_steps_clean": 201,
        "trtllm_habits_wrong_tokens": 0,
        "trtllm_habits_leaked_blocks": 0,
        "v1_held_saves_wrong_tokens": 0,
    }


def test_approximate_blocks_in_the_prefix_cache_end_the_count(tmp_path, monkeypatch):
    monkeypatch.setattr(ActivePlans, "publishable", lambda self, request_id, tokens: tokens)
    assert lived(tmp_path, 600)["stateful_steps_clean"] < 1200


def test_blocks_that_stay_pinned_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(BlockManager, "unpin", lambda self, request_id: None)
    assert lived(tmp_path, 600)["trtllm_habits_leaked_blocks"] > 0


def test_what_others_wrote_into_blocks_that_v1_had_freed_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(DonorSaver, "_snapshot", lambda self, snapshots, donor_id, source, *rest: source)
    assert lived(tmp_path, 600)["v1_held_saves_wrong_tokens"] > 0


def test_donors_with_wrong_bytes_are_counted(tmp_path, monkeypatch):
    stored = HostKv.tensor.fget
    monkeypatch.setattr(HostKv, "tensor", property(lambda self: stored(self) + 1))
    assert lived(tmp_path, 600)["trtllm_habits_wrong_tokens"] > 0
