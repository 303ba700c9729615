"""Agents' histories are read from files, each variant changes them as its harness does, and answers are compared."""

import json
import math

import pytest

from benchmarks.agents.histories import read_histories, sessions_of
from benchmarks.agents.play import Turn, distances
from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import load_tokenizer
from validation.cases import equal_start

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]}


def trajectory(number, turns=12):
    """An agent that reads files, of our own writing."""
    said = [("system", "You mend a house. Say what you do before you do it.")]
    for turn in range(turns):
        lines = " ".join(f"beam {number}.{turn}.{i} is {i * 7 % 13} spans long" for i in range(12 + turn % 3))
        said += [("user", f"Look at room {turn} of house {number}."), ("assistant", None), ("tool", lines)]
        said += [("assistant", f"Room {turn} needs {turn % 5} nails.")]
    return [{"role": role, "content": text} if text else CALL for role, text in said]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "histories.jsonl"
    path.write_text("".join(json.dumps({"messages": trajectory(i)}) + "\n" for i in range(8)))
    return path


@pytest.fixture
def reader(tiny_qwen2_path, monkeypatch):
    tokenizer = load_tokenizer(str(tiny_qwen2_path))
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    return tokenizer


def test_both_forms_of_files_are_read_alike(written, tmp_path):
    listed = tmp_path / "tau.json"
    listed.write_text(json.dumps([{"traj": trajectory(i), "reward": 1} for i in range(8)]))
    histories = read_histories(written, 2, 1_000)
    assert histories == read_histories(listed, 2, 1_000)
    assert [each["role"] for each in histories[0]].count("system") == 1
    assert all(each["content"] for history in histories for each in history)


def test_each_variant_shares_what_its_harness_keeps(written, reader):
    [history] = read_histories(written, 1, 6_000)
    sessions = {name: each for name, [each] in sessions_of(reader, [history], 6_000, 3).items()}
    for session in sessions.values():
        assert len(session) == 4
        assert max(map(len, session)) <= 6_000
    for name in ("volatile", "shared"):  # a prefix cache wins the template alone
        assert equal_start(*sessions[name][:2]) < 80
    assert len(sessions["reread"][1]) > len(sessions["reread"][0])
    assert equal_start(*sessions["shared"][::2]) > 300  # the same agent's


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("[1]", "cannot be read"), ('{"prompt": "x"}', "cannot be read"), ("no", "cannot be read"), ("[]", "text for 0")],
)
def test_other_files_are_refused(tmp_path, text, sentence):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=sentence):
        read_histories(path, 1, 1_000)


def test_too_few_turns_are_refused(written, reader):
    with pytest.raises(ConfigurationError, match="too few for 3 turns"):
        sessions_of(reader, read_histories(written, 1, 600), 600, 3)


def turn(answer, *rows):
    return Turn(1.0, 10, 0, answer, [{token: math.log(p) for token, p in row.items()} for row in rows])


def test_answers_are_compared_up_to_the_first_other_token():
    cold = turn([1, 2, 3], {1: 0.9, 5: 0.1}, {2: 0.5, 6: 0.5}, {3: 1.0})
    warm = turn([1, 6, 9], {1: 0.9, 5: 0.1}, {2: 0.25, 6: 0.75}, {9: 1.0})
    [kl], changed = distances([cold], [warm])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert (kl, changed) == (pytest.approx(expected / 2), 1)
    assert distances([cold], [cold]) == ([pytest.approx(0)], 0)
