"""Profiles that are made on small models and few short prompts, and that reach other engines where they hold there."""

import json

import pytest

from semblend_trt import reuse_profile
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile, terms_name
from validation.arms import VERIFIED, ArmChoices, arms_of
from validation.calibration import command, search
from validation.calibration.command import identity_of
from validation.cli import main
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import BatchServer, ServingSettings
from validation.models import shipped_model
from validation.trtllm_engine import TrtllmEngines

FAMILIES = "reordered,header_trap"
# Fifteen groups show that no more than this wide margin is lost, also in a third confirmation.
MARGIN = 0.4
SHORT = ("--groups", "15", "--budget", "30", "--margin", str(MARGIN), "--tokens", "512", "--max-tokens", "8")
# As the shipped profile's.
CHECK = ProfileCheck(layer=2, threshold=0.22, max_span_share=0.5, min_saved_share=0.1)
UNCHECKED = {"policy": "position_fix", "check": None, "head_tokens": 0}
MADE_WITH = {"groups": 15, "budget": 30, "questions": 1, "tokens": 512, "seed": 3, "max_tokens": 8}
SETTINGS = ServingSettings(str(shipped_model()), max_tokens=8, batch=4)


def told(profile, what):
    return [figure for figure in profile.figures if figure["what"] == what]


def calibrate(path, *options):
    few = ("--screening-groups", "6", "--generations", "0", "--families", FAMILIES, "--output", str(path))
    return main(["calibrate", *SHORT, *few, *options])


def confirm(path, *options, engine="trtllm"):
    return main(["confirm", "--profile", str(path), "--engine", engine, *options])


def reuse_in(engines, path):
    """What the arm verified reuses of a harmless family."""
    cases = write_cases(engines, FamilyRequest(("reordered",), groups=2, questions=1, tokens=512))
    [arm] = arms_of([VERIFIED], ArmChoices(engines.facts.num_layers, boundary=1, profile=path, profile_layers=2))
    return [answer.reuse for answer in BatchServer(engines, cases, SETTINGS).answers(arm).values()]


def test_the_header_trap_rules_cheap_policies_out_and_a_check_passes(tmp_path, capsys, monkeypatch):
    path = tmp_path / "profile.json"
    for module in (reuse_profile, command):
        monkeypatch.setattr(module, "EVIDENCE_FAMILIES", tuple(FAMILIES.split(",")))
    for module in (reuse_profile, search):
        monkeypatch.setattr(module, "EVIDENCE_MARGIN", MARGIN)
    assert calibrate(path, "--generations", "1") == 0
    profile = ReuseProfile.read(path)
    assert (profile.policy, profile.generations) == ("verified", 1)
    assert profile.check.layer >= 2
    tried = told(profile, "tried")
    assert (tried[0]["candidate"], tried[0]["inferior_family"]) == ("position_fix", "header_trap")
    screened = [figure for figure in tried if figure["stage"] == "screen"]
    assert len({figure["candidate"] for figure in screened}) == len(screened)
    assert tried[-1]["candidate"] == f"{tried[-2]['candidate']} generations 1"
    assert [(each["stage"], each["holds"]) for each in tried[-2:]] == [("confirm", True)] * 2
    refuted = {figure["candidate"] for figure in tried[:-2] if figure["stage"] == "confirm"}
    cheaper = [each for each in screened if each["computed_share"] < tried[-1]["computed_share"]]
    assert all(not each["holds"] or each["candidate"] in refuted for each in cheaper)
    confirmed = {figure["family"]: figure for figure in told(profile, "confirmed")}
    assert set(confirmed) == {"reordered", "header_trap"}
    assert confirmed["reordered"]["reused_tokens"] > 0.5 * confirmed["reordered"]["offered_tokens"]
    # The check alone has held as well, and costs more.
    assert profile.check.sample_every
    assert profile.evidence_refusal() is None
    thinner = profile.check.model_copy(update={"sample_every": 2 * profile.check.sample_every})
    assert "a confirmation" in str(profile.model_copy(update={"check": thinner}).evidence_refusal())
    assert any(figure["holds"] and figure["computed_share"] > tried[-1]["computed_share"] for figure in screened)
    assert confirmed["reordered"]["sampled_tokens"] > 0
    [sample] = told(profile, "sample")
    assert 0.0 <= sample["unseen_share"] < sample["unseen_share_at_most"] < 0.05
    assert "calibrate" in profile.command
    assert capsys.readouterr().out.splitlines()[-1].endswith("profile.json")


def test_a_model_that_answers_nothing_gets_exact_spans_only(tiny_qwen2_path, tmp_path, capsys):
    path = tmp_path / "profile.json"
    model = ("--model", str(tiny_qwen2_path), "--device", "cpu", "--form", "yardstick")
    assert calibrate(path, *model, "--tokens", "960", "--max-tokens", "2") == 1
    profile = ReuseProfile.read(path)
    assert (profile.policy, profile.check) == ("exact", None)
    assert "nothing can be shown: no trap family" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "change", "sentence"),
    [
        (4, {"reference": None}, "1 of 4 cases have no reference (c0)"),
        (4, {"donors": []}, "1 of 4 cases have no donor (c0)"),
        (3, {}, "holds 3 cases; a calibration needs at least 4"),
    ],
)
def test_own_prompts_need_references_and_donors(tmp_path_factory, check_refused, count, change, sentence):
    cases = [{"id": f"c{i}", "donors": ["text"], "prompt": "text", "reference": "text"} for i in range(count)]
    path = tmp_path_factory.mktemp("own") / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in [cases[0] | change, *cases[1:]]))
    check_refused(["calibrate", "--prompts", str(path)], sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--screening-groups", "0"], "--screening-groups is 0"),
        (["--max-tries", "0"], "--max-tries is 0"),
        (["--generations", "9"], "Argument --generations: invalid choice: 9"),
        (["--margin", "1"], "--margin is 1; it must lie between 0 and 1"),
        (["--budget", "99"], "--budget is 99; it must be at least 125"),
        (["--families", "unrelated"], "has neither a harmless family nor a trap"),
        (["--families", "lucky"], "The family 'lucky' is unknown"),
        (
            ["--engine", "trtllm", "--kv-dtype", "fp8"],
            "--kv-dtype fp8 is for --engine embedded and vllm, not for trtllm",
        ),
        (["--output", "."], "is a folder"),
    ],
)
def test_bad_usage_of_calibrate_is_one_sentence_and_leaves_nothing(arguments, sentence, check_refused):
    check_refused(["calibrate", *arguments], sentence)


@pytest.fixture
def made(shipped, tmp_path):
    """Writes a profile of the embedded engine; `fields` as of `ReuseProfile.made_for`."""

    def make(kv_dtype="auto", **fields):
        figures = [{"what": "rule", "margin": MARGIN}, {"what": "prompts", **MADE_WITH}]
        figures += [{"what": "confirmed", "family": name} for name in FAMILIES.split(",")]
        name = terms_name("verified", 0, CHECK)
        figures.append({"what": "tried", "stage": "confirm", "candidate": name, "holds": True})
        given = {"policy": "verified", "check": CHECK, "head_tokens": 8, "figures": figures, **fields}
        path = tmp_path / "profile.json"
        engines = EmbeddedEngines(shipped.runner, kv_dtype)
        ReuseProfile.made_for(*identity_of(engines, SETTINGS), **given).write(path)
        return path

    return make


@pytest.mark.usefixtures("_trtllm")
def test_a_profile_from_elsewhere_is_confirmed_and_then_reuses_moved_text(made):
    path, trtllm = made(), TrtllmEngines(str(shipped_model()))
    assert {(each.reason, each.reused) for each in reuse_in(trtllm, path)} == {("profile_mismatch", 0)}
    assert confirm(path) == 0
    profile = ReuseProfile.read(path)
    first, second = profile.engines
    assert first.startswith("engine_wrapper/")
    assert second.startswith("tensorrt_llm/TRTLLM/")
    [made_there] = told(profile, "engine_confirmed")
    assert (made_there["engine"], len(made_there["date"])) == (second, 10)
    assert [line["family"] for line in made_there["families"]] == ["header_trap", "reordered"]
    for line in made_there["families"]:
        assert line["likelihood_vs_cold"]["lower"] >= -MARGIN
        assert line["exact_match_vs_cold"]["difference"] == 0.0
    assert made_there["prompts"] == {**MADE_WITH, "seed": 1003, "budget": 120, "min_match_length": 64}
    assert all(each.reused > 100 and each.reason is None for each in reuse_in(trtllm, path))
    assert confirm(path, *SHORT) == 0
    again = ReuseProfile.read(path)
    assert again.engines == profile.engines
    assert len(told(again, "engine_confirmed")) == 1


@pytest.mark.usefixtures("_trtllm")
@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        (UNCHECKED, (), "not shown to be as good as cold, and the profile stays as it is: fails at header_trap"),
        ({"check": CHECK.model_copy(update={"threshold": 0.0})}, (), "nothing was reused"),
        ({}, ("--families", "reordered"), "nothing can be shown, and"),
    ],
    ids=["no check", "a check that accepts nothing", "no trap"],
)
def test_a_profile_that_does_not_hold_in_the_engine_stays_as_it_is(made, fields, options, said, capsys):
    path = made(**fields)
    before, output = path.read_bytes(), path.with_name("other.json")
    assert confirm(path, *options, "--output", str(output)) == 1
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"]
    shown = capsys.readouterr().out
    assert said in shown
    assert "stays as it is" in shown


def test_an_engine_that_is_listed_is_confirmed_again(made, shipped, tmp_path):
    """With KV in fp8, the dtype that the profile was made for, and in no other."""
    path, output = made("fp8", generations=1), tmp_path / "out" / "profile.json"
    assert confirm(path, "--output", str(output), engine="embedded") == 0
    profile = ReuseProfile.read(output)
    assert (profile.engines, profile.generations) == (ReuseProfile.read(path).engines, 1)
    # Its donors are of that generation here as well.
    [made_here] = told(profile, "engine_confirmed")
    assert max(line["generation"] for line in made_here["families"]) == 1
    assert len(ReuseProfile.read(path).figures) == 5
    assert profile.namespace["kv_dtype"] == "float8_e4m3fn"
    assert all(each.reused > 100 for each in reuse_in(EmbeddedEngines(shipped.runner, "fp8"), output))
    assert {(each.reason, each.reused) for each in reuse_in(shipped, output)} == {("profile_mismatch", 0)}


def test_nothing_but_the_engine_may_differ(made, capsys):
    path = made()
    held = ReuseProfile.read(path)
    held.model_copy(update={"namespace": {**held.namespace, "model_revision": "other"}}).write(path)
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
        ({}, ("--output", "."), "is a folder"),
        ({}, ("--profile", "/nowhere.json"), "/nowhere.json cannot be read"),
    ],
)
def test_bad_usage_of_confirm_is_one_sentence(made, fields, options, sentence, capsys):
    path = made(**fields)
    before = path.read_bytes()
    assert confirm(path, *options, engine="embedded") == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert (said.out, said.err.count("\n"), path.read_bytes()) == ("", 1, before)


@pytest.mark.usefixtures("_trtllm")
def test_a_calibration_inside_tensorrt_llm_finds_what_its_own_answers_allow(tmp_path):
    path = tmp_path / "profile.json"
    # With a margin at which a check in the lowest layer is shown to lose more.
    narrow = ("--groups", "14", "--budget", "28", "--margin", "0.3", "--screening-groups", "10")
    assert calibrate(path, *narrow, "--engine", "trtllm") == 0
    profile = ReuseProfile.read(path)
    [engine] = profile.engines
    assert engine.startswith("tensorrt_llm/TRTLLM/")
    assert profile.policy == "verified"
    tried = told(profile, "tried")
    assert tried[0]["inferior_family"] == "header_trap"
    # Two families and so wide a margin justify nothing unchecked.
    assert all(each["candidate"].startswith("verified") and "sample" not in each["candidate"] for each in tried)
    assert all(each.reused > 100 for each in reuse_in(TrtllmEngines(str(shipped_model())), path))
