"""The yardstick beside us: what is recorded of it, and what it refuses."""

import pytest

from benchmarks.vllm import lmcache
from benchmarks.vllm.lmcache import add_divergence, add_times, check_served
from validation.results import Measured, Results


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(lmcache, "version", {"lmcache": "0.5.6", "vllm": "0.33.0"}.get)
    return Results(measured=Measured("command", {}, {}, "2026-01-01"))


def test_a_folder_without_a_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        lmcache.main(["--answers", "nowhere"])
    assert "nowhere holds no config.json" in capsys.readouterr().err


def test_rows_have_times_of_what_lmcache_served(rows):
    add_times(rows, [700.0, 710.0, 690.0], [350.0, 360.0, 340.0], [24_064] * 3)
    assert [row.value for row in rows.rows] == [700, 350, pytest.approx(0.5)]
    assert "24,064 of 24,576 tokens from LMCache in host memory; LMCache 0.5.6" in rows.rows[1].baseline
    with pytest.raises(SystemExit, match="LMCache served 0 of 24,064 tokens"):
        add_times(rows, [1.0], [1.0], [0])
    check_served(95, 100)


def test_rows_have_divergences(rows):
    add_divergence(rows, "instruction", "smollm2", [0.25, 0.75], [0.0, 0.001], 900, 1_000)
    [row] = rows.rows
    assert (row.name, row.value) == ("vllm_lmcache_blend_kl_instruction_smollm2", 0.5)
    assert all(each in row.baseline for each in ("2 prompts", "900 of 1,000 tokens"))
