"""Requests of a log become cases whose donors are earlier requests that share text."""

import json
import random

import pytest

from semblend_trt.errors import ConfigurationError
from validation.log_cases import MOST_DONORS, log_cases

SHARED = "".join(random.Random(1).choices("abcdefgh ", k=200))


def log_of(folder, *contents):
    path = folder / "log.jsonl"
    bodies = [{"model": "m", "messages": [{"role": "user", "content": each}]} for each in contents]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def test_donors_are_the_latest_earlier_requests_that_share_text(tmp_path, chat_model_path):
    alone = "".join(random.Random(2).choices("ijklmnop ", k=300))
    cases = log_cases(
        log_of(tmp_path, "1 " + SHARED, alone, *(f"{n} {SHARED} {n}" for n in range(2, 7))), chat_model_path, 64
    )
    assert [case.id for case in cases] == [f"line-{line}" for line in range(3, 8)]
    assert [len(case.donors) for case in cases] == [1, 2, 3, 3, MOST_DONORS]
    assert cases[-1].donors == tuple(case.prompt for case in cases[1:4])
    assert cases[0].prompt == f"<|start|>user\n2 {SHARED} 2<|stop|>\n<|start|>assistant\n"
    assert all(case.reference is None and case.is_timed for case in cases)


@pytest.mark.parametrize("contents", [["one text", "quite another"], [SHARED], []])
def test_a_log_in_which_nothing_is_shared_is_refused(tmp_path, chat_model_path, contents):
    with pytest.raises(ConfigurationError, match=f"none of its {len(contents)} prompts shares a run of 64 tokens"):
        log_cases(log_of(tmp_path, *contents), chat_model_path, 64)


def test_a_log_that_cannot_be_read_is_refused(tmp_path, chat_model_path):
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        log_cases(tmp_path / "missing.jsonl", chat_model_path, 64)
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ConfigurationError, match="Passed over: 1 not JSON"):
        log_cases(tmp_path / "bad.jsonl", chat_model_path, 64)
