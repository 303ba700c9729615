"""The command on small models and few short prompts: the profile that it writes, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from semblend_trt.reuse_profile import ReuseProfile
from validation.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORT = ["--groups", "2", "--screening-groups", "2", "--questions", "1", "--tokens", "512"]


def test_the_header_trap_rules_cheap_policies_out_and_a_check_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    assert main(["calibrate", *SHORT, "--families", "reordered,header_trap", "--output", str(path)]) == 0
    profile = ReuseProfile.read(path)
    assert profile.policy == "verified"
    assert profile.check is not None
    assert profile.check.layer >= 2
    tried = [figure for figure in profile.figures if figure["what"] == "tried"]
    assert (tried[0]["candidate"], tried[0]["inferior_family"]) == ("position_fix", "header_trap")
    screened = [figure for figure in tried if figure["stage"] == "screen"]
    assert len({figure["candidate"] for figure in screened}) == len(screened)
    refuted = {figure["candidate"] for figure in tried[:-1] if figure["stage"] == "confirm"}
    cheaper = [each for each in screened if each["computed_share"] < tried[-1]["computed_share"]]
    assert all(not each["holds"] or each["candidate"] in refuted for each in cheaper)
    assert (tried[-1]["stage"], tried[-1]["holds"]) == ("confirm", True)
    confirmed = {figure["family"]: figure for figure in profile.figures if figure["what"] == "confirmed"}
    assert set(confirmed) == {"reordered", "header_trap"}
    assert confirmed["reordered"]["reused_tokens"] > 0.5 * confirmed["reordered"]["offered_tokens"]
    assert "calibrate" in profile.command
    assert capsys.readouterr().out.splitlines()[-1].endswith("profile.json")


def test_a_model_that_answers_nothing_gets_exact_spans_only(
    tiny_qwen2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    model = ["--model", str(tiny_qwen2_path), "--device", "cpu"]
    short = ["--groups", "2", "--screening-groups", "2", "--questions", "1", "--tokens", "960", "--max-tokens", "2"]
    families = ["--families", "reordered,header_trap", "--form", "yardstick"]
    assert main(["calibrate", *model, *short, *families, "--output", str(path)]) == 1
    profile = ReuseProfile.read(path)
    assert (profile.policy, profile.check) == ("exact", None)
    assert "nothing can be shown: no trap family" in capsys.readouterr().out


def test_own_prompts_need_references_and_donors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = [{"id": f"c{i}", "donors": ["text"], "prompt": "text", "reference": "text"} for i in range(4)]
    for name, change, sentence in (
        ("a", [{**cases[0], "reference": None}, *cases[1:]], "1 of 4 cases have no reference (c0)"),
        ("b", [{**cases[0], "donors": []}, *cases[1:]], "1 of 4 cases have no donor (c0)"),
        ("c", cases[:3], "holds 3 cases; a calibration needs at least 4"),
    ):
        path = tmp_path / name
        path.write_text("".join(json.dumps(case) + "\n" for case in change))
        assert main(["calibrate", "--prompts", str(path)]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err
        assert captured.out == ""
    assert not (tmp_path / "reuse-profile.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--screening-groups", "0"], "--screening-groups is 0"),
        (["--max-tries", "0"], "--max-tries is 0"),
        (["--seed", "9" * 30], "it must be at most 4294967295"),
        (["--model", ""], "Argument --model: the name is empty"),
        (["--families", "unrelated"], "has neither a harmless family nor a trap"),
        (["--families", "lucky"], "The family 'lucky' is unknown"),
        (["--prompts", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--output", "."], "is a folder"),
    ],
)
def test_bad_usage_is_one_sentence_and_leaves_nothing(
    arguments: list[str], sentence: str, check_refused: Callable[[list[str], str], None]
) -> None:
    check_refused(["calibrate", *arguments], sentence)
