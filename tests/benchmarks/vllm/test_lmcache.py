"""The yardstick beside us: what is recorded of a part with and without figures, and what LMCache keeps of a prompt."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from transformers import AutoTokenizer

from benchmarks.vllm import lmcache
from benchmarks.vllm.lmcache import Segments, add_rows, line_separator, run_part, write_tokenizer
from semblend_trt.errors import ConfigurationError
from validation.models import shipped_model
from validation.results import Measured, Results

ENGINE = {"lmcache": "0.5.3", "vllm": "0.25.1"}
TIMES = {"engine": ENGINE, "tokens": 24_576, "cached_tokens": [24_400] * 3, "problem": None}
TIMES |= {"cold_ms": [700.0, 710.0, 690.0], "blended_ms": [350.0, 360.0, 340.0]}
TOLD = {"prompts": 24, "cold_em": 0.96, "blended_em": 0.05, "as_the_donor_says": 0.9}
TOLD |= {"cached_tokens": 900, "prompt_tokens": 1_000}
ANSWERS = {"engine": ENGINE, "families": {"header_trap": TOLD}, "problem": None}


def added(parts):
    rows = Results(measured=Measured("command", {}, {}, "2026-01-01"))
    add_rows(parts, rows)
    return {row.name: row for row in rows.rows}


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="LMCache is installed here")
def test_without_lmcache_its_words_stand_in_the_place_of_a_figure(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        lmcache.main(["--out", str(tmp_path)])
    assert ended.value.code == 1
    said = "ModuleNotFoundError: No module named 'lmcache'"
    assert json.loads((tmp_path / "lmcache-ttft.json").read_text()) == {"problem": said}
    assert f"no figure of ttft: {said}" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("code", "timeout", "problem"),
    [
        ("import os; print('last words', flush=True); os.kill(os.getpid(), 9)", 60, "ended with -9: last words"),
        ("import signal; signal.pause()", 0.5, "was ended after 0 s"),
    ],
    ids=["dies", "never ends"],
)
def test_a_part_without_an_answer_is_recorded(code, timeout, problem, tmp_path, monkeypatch):
    (tmp_path / "lmcache-ttft.json").write_text('{"tokens": 1}')  # of an earlier run
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run([sys.executable, "-c", code], **options))
    assert run_part("ttft", tmp_path, timeout) == {"problem": f"its process {problem}"}


def test_rows_tell_cold_blended_and_answers_and_a_part_that_was_not_served_gives_none():
    rows = added({"ttft": TIMES, "model": ANSWERS})
    assert rows["vllm_lmcache_blended_ttft_24k_ms"].value == 350
    assert rows["vllm_lmcache_blended_ttft_24k_over_cold"].value == pytest.approx(0.5)
    assert "24,400 of 24,576" in rows["vllm_lmcache_blended_ttft_24k_ms"].baseline
    trap = rows["vllm_lmcache_em_header_trap_model"]
    assert trap.value == pytest.approx(0.05)
    assert "cold 0.960" in trap.baseline
    assert "LMCache 0.5.3" in trap.baseline
    assert added({"ttft": TIMES | {"problem": "LMCache served 0 of 9 tokens"}, "model": {"problem": "died"}}) == {}


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        lmcache.main(["--out", str(tmp_path), "--answers", "nowhere"])
    assert "nowhere holds no config.json" in capsys.readouterr().err


def test_segments_that_a_prompt_lacks_are_those_in_front_of_its_last():
    segments = Segments([1, 1])
    donor = segments.join([5, 6], [7], [8])
    assert donor == [5, 6, 1, 1, 7, 1, 1, 8]
    assert segments.of(donor) == [(5, 6), (7,), (8,)]
    segments.keep(donor)
    assert segments.missing(segments.join([9], [7], [4, 2], [9], [3])) == [(9,), (4, 2)]
    assert segments.missing(donor) == []
    assert Segments([1]).of([2, 1, 1, 3]) == [(2,), (), (3,)]


def test_tokenizers_have_the_separators_that_lmcache_will_find(tmp_path):
    write_tokenizer(tmp_path)
    marks = AutoTokenizer.from_pretrained(str(tmp_path)).encode(" # # # #")
    assert marks == [1] * 4
    with pytest.raises(ConfigurationError, match="no token of its own"):
        line_separator(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(shipped_model()))
    ends = tokenizer.encode(line_separator(shipped_model()))[1:]
    assert tokenizer.decode(ends) == "\n"
