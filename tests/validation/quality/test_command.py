"""The command on the shipped model with a few short prompts: its files, its findings, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from validation import scoreboard
from validation.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORT = ["--groups", "2", "--questions", "1", "--tokens", "640"]


def test_a_run_shows_that_the_header_trap_bites_and_leaves_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--output", str(tmp_path / "out" / "quality.json"), "--record", str(tmp_path / "rows"), "--machine", "m"]
    arms = ["--arms", "wrapper_without_plan,position_fix", "--families", "reordered,prose,header_trap,unrelated"]
    assert main(["quality", *SHORT, *arms, *places]) == 0
    document = json.loads((tmp_path / "out" / "quality.json").read_text())
    lines = {(line["family"], line["arm"]): line for line in document["lines"]}
    assert {arm for _, arm in lines} == {"cold", "cold_again", "wrapper_without_plan", "position_fix"}
    assert lines["reordered", "position_fix"]["exact_match"] == lines["reordered", "cold"]["exact_match"] == 1.0
    assert lines["reordered", "position_fix"]["reused_share"] == 1.0
    assert lines["header_trap", "cold"]["exact_match"] == 1.0
    assert lines["header_trap", "position_fix"]["follows_donor"] >= 0.5
    assert not lines["header_trap", "position_fix"]["non_inferior"]
    assert lines["unrelated", "position_fix"]["fires"] == 0
    assert lines["prose", "position_fix"]["ppl_ratio"] == pytest.approx(1.0, abs=0.02)
    for family in ("reordered", "prose", "header_trap", "unrelated"):
        assert lines[family, "wrapper_without_plan"]["first_token_kl"] < 1e-6
        assert lines[family, "cold_again"]["first_token_kl"] < 1e-6
    assert (tmp_path / "out" / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert "(quality.png)" in (tmp_path / "out" / "quality.md").read_text()
    [rows] = scoreboard.read_rows(tmp_path / "rows").values()
    assert [row.name for row in rows] == ["position_fix_em_header_trap", "unrelated_fires"]
    shown = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in shown[-3:]] == ["quality.json", "quality.md", "quality.png"]


def test_a_device_has_no_page_and_no_plot_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "out.json"
    link.symlink_to("/dev/null")
    few = ["quality", "--groups", "1", "--questions", "1", "--tokens", "640", "--families", "prose", "--arms", "cold"]
    assert main([*few, "--output", str(link)]) == 0
    assert list(tmp_path.iterdir()) == [link]
    assert capsys.readouterr().out.splitlines()[-1] == str(link)
    assert main([*few, "--output", str(tmp_path / "\x1b[2J.json"), "--page", str(link)]) == 0
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["\x1b[2J.json", "out.json"]
    assert capsys.readouterr().out.splitlines()[-2:] == [f"{tmp_path}/\\x1b[2J.json", str(link)]


@pytest.mark.parametrize("subcommand", ["quality", "calibrate", "confirm", "replay"])
def test_help_names_the_status_of_an_interrupted_run(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([subcommand, "--help"]) == 0
    assert "130 interrupted" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--groups", "0"], "--groups is 0; it must be at least 1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--families", ""], "Argument --families: the name is empty"),
        (["--arms", " "], "Argument --arms: the name is empty"),
        (["--families", "reordered,lucky"], "The family 'lucky' is unknown"),
        (["--families", "squad"], "name their folder with --eval-data"),
        (["--arms", "lucky"], "--arms names 'lucky'"),
        (["--arms", "boundary_9"], "the model has 8"),
        (["--tokens", "100"], "leave"),
        (["--tokens", "9000"], "the model's context holds 8192"),
        (["--profile", "missing.json"], "--profile missing.json is not a file"),
        (["--form", "fancy"], "invalid choice: 'fancy'"),
        (["--output", "."], "is a folder"),
    ],
)
def test_bad_usage_is_one_sentence_and_leaves_nothing(
    arguments: list[str], sentence: str, check_refused: Callable[[list[str], str], None]
) -> None:
    check_refused(["quality", *arguments], sentence)
