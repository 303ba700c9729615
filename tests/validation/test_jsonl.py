"""Cases are read whole or refused with the line that is at fault."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from semblend_trt.errors import ConfigurationError
from validation.cases import Expectation
from validation.jsonl import read_cases

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"id": "a", "donors": ["first donor", "second"], "prompt": "prompt", "reference": None}


def written(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "cases.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_a_line_becomes_a_case(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD | {"id": "b", "reference": "42", "donors": []}))
    first, second = read_cases(path)
    assert (first.id, first.donors, first.prompt) == ("a", ("first donor", "second"), "prompt")
    assert first.reference is None
    assert not first.known_answer
    assert first.expects is Expectation.ANY
    assert first.is_timed
    assert second.known_answer
    assert second.donors == ()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "EOF"),
        ("[]", "object"),
        (json.dumps(GOOD | {"prompt": ""}), "prompt"),
        (json.dumps(GOOD | {"donors": [""]}), r"donors\.0"),
        (json.dumps(GOOD | {"donors": "text"}), "donors"),
        (json.dumps(GOOD | {"id": 7}), "id"),
        (json.dumps(GOOD | {"prompts": "x"}), "prompts"),
        (json.dumps({key: GOOD[key] for key in ("id", "donors")}), "prompt"),
        (b'{"id": "\xff\xfe"}', "line 2"),
        (json.dumps(GOOD), "'a' is used twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, problem: str) -> None:
    path = written(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(ConfigurationError, match="line 2") as refused:
        read_cases(path)
    assert refused.match(problem)
    assert "\n" not in str(refused.value)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no case"):
        read_cases(written(tmp_path, "", " "))
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_cases(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_cases(tmp_path)
