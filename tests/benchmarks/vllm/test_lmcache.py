"""The yardstick beside us: what is recorded of it, what it refuses, and what LMCache keeps of a prompt."""

import pytest
from transformers import AutoTokenizer

from benchmarks.vllm import lmcache
from benchmarks.vllm.lmcache import Segments, add_times, check_served, line_separator, write_tokenizer
from semblend_trt.errors import ConfigurationError
from validation.models import shipped_model
from validation.results import Measured, Results


def test_a_folder_without_a_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        lmcache.main(["--answers", "nowhere"])
    assert "nowhere holds no config.json" in capsys.readouterr().err


def test_rows_tell_times_of_what_lmcache_served(monkeypatch):
    monkeypatch.setattr(lmcache, "version", {"lmcache": "0.5.3", "vllm": "0.25.1"}.get)
    rows = Results(measured=Measured("command", {}, {}, "2026-01-01"))
    add_times(rows, [700.0, 710.0, 690.0], [350.0, 360.0, 340.0], [24_400] * 3)
    assert [row.value for row in rows.rows] == [700, 350, pytest.approx(0.5)]
    assert "24,400 of 24,576 tokens from LMCache in host memory; LMCache 0.5.3" in rows.rows[1].baseline
    check_served(95, 100)
    with pytest.raises(SystemExit, match="LMCache served 0 of 9 tokens"):
        check_served(0, 9)


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
    assert AutoTokenizer.from_pretrained(str(tmp_path)).encode(" # # # #") == [1] * 4
    with pytest.raises(ConfigurationError, match="no token of its own"):
        line_separator(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(shipped_model()))
    assert tokenizer.decode(tokenizer.encode(line_separator(shipped_model()))[1:]) == "\n"
