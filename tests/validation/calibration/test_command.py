"""The command on small models and few short prompts: the profile that it writes, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.validation import trtllm_stand_in
from validation.arms import VERIFIED, ArmChoices, arms_of
from validation.calibration.command import identity_of
from validation.cli import main
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest, write_cases
from validation.models import load, shipped_model
from validation.serving import BatchServer, BatchSettings
from validation.trtllm_engine import TrtllmEngines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from validation.engines import Engines
    from validation.serving import Reuse

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


FAMILIES = "reordered,header_trap"
FEW = ("--groups", "2", "--questions", "1", "--tokens", "512", "--max-tokens", "8")
# As the shipped profile's.
CHECK = ProfileCheck(layer=2, threshold=0.22, max_span_share=0.5, min_saved_share=0.1)
MADE_WITH = {"what": "prompts", "groups": 2, "questions": 1, "tokens": 512, "seed": 3, "max_tokens": 8}
SETTINGS = BatchSettings(str(shipped_model()), max_tokens=8, groups=4, batch_size=4)


@pytest.fixture
def _trtllm(monkeypatch: pytest.MonkeyPatch) -> None:
    trtllm_stand_in.install(monkeypatch)


@pytest.fixture(scope="module")
def embedded() -> Engines:
    return EmbeddedEngines(load(None, "cpu", "float32"))


@pytest.fixture
def made(embedded: Engines, tmp_path: Path) -> Callable[..., Path]:
    """Writes a profile of the embedded engine; `fields` as of `ReuseProfile.made_for`."""

    def make(**fields: Any) -> Path:
        confirmed = [{"what": "confirmed", "family": name} for name in FAMILIES.split(",")]
        given = {"policy": "verified", "check": CHECK, "head_tokens": 8, "figures": [MADE_WITH, *confirmed], **fields}
        path = tmp_path / "profile.json"
        ReuseProfile.made_for(*identity_of(embedded, SETTINGS), **given).write(path)
        return path

    return make


def confirm(path: Path, *options: str, engine: str = "trtllm") -> int:
    return main(["confirm", "--profile", str(path), "--engine", engine, *options])


def reuse_in(engines: Engines, path: Path) -> list[Reuse]:
    """What the arm verified reuses of a harmless family."""
    cases = write_cases(engines, FamilyRequest(("reordered",), groups=2, questions=1, tokens=512))
    [arm] = arms_of([VERIFIED], ArmChoices(engines.facts.num_layers, boundary=1, profile=path, profile_layers=2))
    return [answer.reuse for answer in BatchServer(engines, cases, SETTINGS).answers(arm).values()]


def reasons(found: Sequence[Reuse]) -> set[str | None]:
    return {each.reason for each in found}


@pytest.mark.usefixtures("_trtllm")
def test_a_profile_from_elsewhere_is_confirmed_and_then_reuses_moved_text(made: Callable[..., Path]) -> None:
    path, trtllm = made(), TrtllmEngines(str(shipped_model()))
    before = reuse_in(trtllm, path)
    assert (reasons(before), sum(each.reused for each in before)) == ({"profile_mismatch"}, 0)
    assert confirm(path) == 0
    profile = ReuseProfile.read(path)
    first, second = profile.engines
    assert first.startswith("engine_wrapper/")
    assert second.startswith("tensorrt_llm/TRTLLM/")
    [told] = [figure for figure in profile.figures if figure["what"] == "engine_confirmed"]
    assert (told["engine"], len(told["date"])) == (second, 10)
    assert [line["family"] for line in told["families"]] == ["header_trap", "reordered"]
    assert all(line["exact_match_vs_cold"]["lower"] >= -0.01 for line in told["families"])
    assert told["prompts"] == {**{name: MADE_WITH[name] for name in MADE_WITH if name != "what"}, "seed": 1003} | {
        "min_match_length": 64,
        "plants": 1_024,
    }
    after = reuse_in(trtllm, path)
    assert all(each.reused > 100 for each in after)
    assert reasons(after) == {None}
    assert confirm(path, *FEW) == 0
    again = ReuseProfile.read(path)
    assert again.engines == profile.engines
    assert sum(figure["what"] == "engine_confirmed" for figure in again.figures) == 1


@pytest.mark.usefixtures("_trtllm")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policy": "position_fix", "check": None, "head_tokens": 0}, "not shown to be as good as cold at header_trap"),
        ({"check": CHECK.model_copy(update={"threshold": 1.0, "max_span_share": 1.0})}, "header_trap"),
        ({"check": CHECK.model_copy(update={"threshold": 0.0})}, "nothing was reused"),
    ],
    ids=["no check", "a check that accepts anything", "a check that accepts nothing"],
)
def test_a_profile_that_does_not_hold_in_the_engine_stays_as_it_is(
    made: Callable[..., Path], fields: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(**fields)
    before, output = path.read_bytes(), path.with_name("other.json")
    assert confirm(path, "--output", str(output)) == 1
    assert path.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == ["profile.json"]
    told = capsys.readouterr().out
    assert said in told
    assert "stays as it is" in told


@pytest.mark.usefixtures("_trtllm")
def test_a_family_that_the_model_does_not_know_here_shows_nothing(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = made()
    assert confirm(path, "--families", "reordered") == 1
    assert "nothing can be shown, and the profile stays as it is: no trap family" in capsys.readouterr().out


def test_an_engine_that_is_listed_is_confirmed_again(made: Callable[..., Path], tmp_path: Path) -> None:
    path, output = made(), tmp_path / "out" / "profile.json"
    assert confirm(path, "--output", str(output), engine="embedded") == 0
    assert ReuseProfile.read(output).engines == ReuseProfile.read(path).engines
    assert len(ReuseProfile.read(path).figures) == 3


def test_nothing_but_the_engine_may_differ(made: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = made()
    values = json.loads(path.read_text())
    values["namespace"]["model_revision"] = "other"
    path.write_text(json.dumps(values))
    before = path.read_bytes()
    assert confirm(path, engine="embedded") == 2
    assert "cannot be confirmed here: The profile was made for weights other" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("fields", "options", "sentence"),
    [
        ({"policy": "exact", "check": None, "head_tokens": 0}, (), "allows exact spans only"),
        ({"figures": [{"what": "confirmed", "family": "prompts"}]}, (), "name their file with --prompts"),
        ({}, ("--engine", "trtllm"), "tensorrt_llm cannot be imported here"),
        ({}, ("--families", "unrelated"), "has neither a harmless family nor a trap"),
        ({}, ("--groups", "0"), "--groups is 0"),
        ({}, ("--output", "."), "is a folder"),
        ({}, ("--profile", "/nowhere.json"), "/nowhere.json cannot be read"),
    ],
)
def test_bad_usage_is_one_sentence(
    made: Callable[..., Path],
    fields: dict[str, Any],
    options: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = made(**fields)
    before = path.read_bytes()
    assert confirm(path, *options, engine="embedded") == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert (said.out, said.err.count("\n"), path.read_bytes()) == ("", 1, before)


@pytest.mark.usefixtures("_trtllm")
def test_a_calibration_inside_tensorrt_llm_finds_what_its_own_answers_allow(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = ["--engine", "trtllm", "--families", FAMILIES, "--screening-groups", "2", "--output", str(path)]
    assert main(["calibrate", *options, *FEW]) == 0
    profile = ReuseProfile.read(path)
    [engine] = profile.engines
    assert engine.startswith("tensorrt_llm/TRTLLM/")
    assert profile.policy == "verified"
    tried = [figure for figure in profile.figures if figure["what"] == "tried"]
    assert (tried[0]["candidate"], tried[0]["inferior_family"]) == ("position_fix", "header_trap")
    assert all(each.reused > 100 for each in reuse_in(TrtllmEngines(str(shipped_model())), path))
