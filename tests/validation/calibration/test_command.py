"""Profiles that are made on small models and few short prompts, and that reach other engines where they hold there."""

import json

import pytest

from semblend_trt.reuse_profile import ProfileBound, ProfileCheck, ProfileLevel, ReuseProfile, terms_name
from validation.arms import VERIFIED, ArmChoices, arms_of
from validation.calibration import calibration
from validation.calibration.prepared import identity_of
from validation.cli import main
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import BatchServer, ServingSettings
from validation.models import shipped_model
from validation.trtllm_engine import TrtllmEngines

FAMILIES = "reordered,header_trap"
# Three groups show this risk, if none of them is over a bound; one more fixes what they test.
RISK = 0.7
SHORT = ("--tokens", "344", "--max-tokens", "4", "--risk", str(RISK), "--groups", "4", "--shares", "0,0.3")
# As the shipped profile's.
CHECK = ProfileCheck(layer=2, threshold=0.22, max_span_share=0.5, min_saved_share=0.1)
UNCHECKED = ProfileCheck(layer=1, threshold=1.0, sample_every=16, sample_threshold=1.0)
BOUND = ProfileBound(max_kl=0.05, risk=0.1, levels=[ProfileLevel(deviation=1e3, share=0.0)])
MADE_WITH = {"groups": 2, "questions": 1, "tokens": 512, "seed": 3, "max_tokens": 8}
SETTINGS = ServingSettings(str(shipped_model()), max_tokens=8, batch=4)


def told(profile, what):
    return [figure for figure in profile.figures if figure["what"] == what]


def calibrate(path, *options):
    return main(["calibrate", *SHORT, "--families", FAMILIES, "--output", str(path), *options])


def confirm(path, *options, engine="trtllm"):
    return main(["confirm", "--profile", str(path), "--engine", engine, *options])


def reuse_in(engines, path, **settings):
    """What the arm verified reuses of a harmless family."""
    cases = write_cases(engines, FamilyRequest(("reordered",), groups=1, questions=1, tokens=512))
    [arm] = arms_of([VERIFIED], ArmChoices(engines.facts.num_layers, boundary=1, profile=path, profile_layers=2))
    arm.variables.update(settings)
    return [answer.reuse for answer in BatchServer(engines, cases, SETTINGS).answers(arm).values()]


@pytest.mark.promise(
    "policies",
    "`calibrate` chooses bounds that hold: a trap rules the cheap checks out, and new prompts confirm each bound",
)
def test_a_trap_rules_cheap_checks_out_and_bounds_hold_after_one(shipped, tmp_path, capsys, monkeypatch):
    path, candidates = tmp_path / "profile.json", calibration.candidates

    def two_checks(*given):
        """The cheapest check, and the cheapest in a higher layer."""
        cheapest, *others = candidates(*given)
        return [cheapest, next(each for each in others if each.check.layer > 1)]

    monkeypatch.setattr(calibration, "candidates", two_checks)
    assert calibrate(path) == 0
    profile = ReuseProfile.read(path)
    assert capsys.readouterr().out.splitlines()[-1].endswith("profile.json")
    assert [each.max_kl for each in profile.bounds] == sorted(each.max_kl for each in profile.bounds)
    assert profile.bounds[-1].max_kl == 0.1
    for bound in profile.bounds:
        confirmed = [each for each in told(profile, "bound_confirmed") if each["max_kl"] == bound.max_kl]
        assert {(*each["families"], each["prompts"]) for each in confirmed} == {("reordered", 1), ("header_trap", 1)}
        assert profile.evidence_refusal(bound.max_kl, RISK) is None
    assert profile.evidence_refusal(0.1, 0.01) is None
    assert profile.terms_for(0.1, 0.01) is None
    settings = {"SEMBLEND_MAX_KL": "0.1", "SEMBLEND_RISK": str(RISK)}
    assert all(each.reused_tokens > 100 and each.reason is None for each in reuse_in(shipped, path, **settings))
    tried = [(each["holds"], each["inferior_family"]) for each in told(profile, "tried")]
    assert tried == [(False, "header_trap"), (True, None)]
    assert profile.check.layer >= 2
    assert profile.check.sample_every


def test_a_model_without_marks_gets_the_layer_whose_deviations_say_most(shipped, tmp_path, capsys):
    path = tmp_path / "profile.json"
    model = ("--model", str(shipped_model()), "--device", "cpu", "--form", "plain", "--shares", "0", "--tokens", "400")
    assert calibrate(path, *model, "--families", "reordered") in (0, 1)
    profile = ReuseProfile.read(path)
    [layers] = told(profile, "layers")
    assert set(layers["correlation"]) == {"1", "2", "3"}
    best = max(layers["correlation"], key=layers["correlation"].get)
    assert profile.check is None or str(profile.check.layer) == best
    [floor] = told(profile, "rounding")
    assert floor["prompts"] == 3
    [compared] = told(profile, "compared")
    is_better = compared["kl_with"] < compared["kl_without"]
    assert profile.check is None or profile.check.compares_all == is_better


def test_where_nothing_holds_the_profile_allows_exact_spans_only(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert calibrate(path, "--max-tries", "1") == 1
    profile = ReuseProfile.read(path)
    assert (profile.policy, profile.check, profile.bounds) == ("exact", None, [])
    assert "exact spans only" in capsys.readouterr().out


def test_own_prompts_in_too_few_groups_are_refused(tmp_path_factory, check_refused):
    path = tmp_path_factory.mktemp("own") / "cases.jsonl"
    path.write_text("".join(json.dumps({"donors": ["text"], "prompt": "text"}) + "\n" for _ in range(4)))
    check_refused(
        ["calibrate", *SHORT, "--prompts", str(path)], "'prompts' of your own prompts leaves 2 groups to show a bound"
    )


@pytest.fixture
def made(shipped, tmp_path):
    """Writes a profile of the embedded engine; `fields` as of `ReuseProfile.made_for`."""

    def make(kv_dtype="auto", **fields):
        figures = [{"what": "prompts", **MADE_WITH}]
        figures += [{"what": "observed", "family": name} for name in FAMILIES.split(",")]
        name = terms_name("verified", CHECK)
        figures.append({"what": "tried", "stage": "confirm", "candidate": name, "holds": True})
        given = {"policy": "verified", "check": CHECK, "head_tokens": 8, "figures": figures, **fields}
        path = tmp_path / "profile.json"
        engines = EmbeddedEngines(shipped.runner, kv_dtype)
        ReuseProfile.made_for(*identity_of(engines, SETTINGS), **given).write(path)
        return path

    return make


@pytest.mark.promise(
    "policies", "`confirm` adds an engine where no bound is refuted, and else leaves the file as it was"
)
@pytest.mark.promise(
    "policies", "`calibrate` and `confirm` run inside TensorRT-LLM's API, played by an engine of its shape"
)
@pytest.mark.usefixtures("_trtllm")
def test_a_profile_from_elsewhere_is_confirmed_and_then_reuses_moved_text(made):
    path, trtllm = made(), TrtllmEngines(str(shipped_model()))
    assert {(each.reason, each.reused_tokens) for each in reuse_in(trtllm, path)} == {("profile_mismatch", 0)}
    assert confirm(path) == 0
    profile = ReuseProfile.read(path)
    first, second = profile.engines
    assert first.startswith("engine_wrapper/")
    assert second.startswith("tensorrt_llm/TRTLLM/")
    [made_there] = told(profile, "engine_confirmed")
    assert (made_there["engine"], len(made_there["date"])) == (second, 10)
    lines = [(line["family"], line["prompts"], line["broken"], line["max_kl"]) for line in made_there["families"]]
    # A profile of an earlier version is held to the loosest bound.
    assert sorted(lines) == [("header_trap", 2, 0, 0.1), ("reordered", 2, 0, 0.1)]
    assert made_there["prompts"] == {**MADE_WITH, "seed": 2003, "min_match_length": 64}
    assert all(each.reused_tokens > 100 and each.reason is None for each in reuse_in(trtllm, path))
    assert confirm(path, "--groups", "1") == 0
    again = ReuseProfile.read(path)
    assert again.engines == profile.engines
    assert len(told(again, "engine_confirmed")) == 1


@pytest.mark.promise("policies", "`confirm` adds an engine where no...")
@pytest.mark.usefixtures("_trtllm")
@pytest.mark.parametrize(
    ("fields", "heard"),
    [
        ({"check": UNCHECKED, "bounds": [BOUND], "floor": 1e-6}, ["0.05 nats: over it were", "fails at header_trap"]),
        ({"check": CHECK.model_copy(update={"threshold": 0.0})}, ["nothing was reused"]),
    ],
    ids=["a bound", "a check that accepts nothing"],
)
def test_a_profile_that_does_not_hold_in_the_engine_stays_as_it_is(made, fields, heard, capsys):
    path = made(**fields)
    before, output = path.read_bytes(), path.with_name("other.json")
    assert confirm(path, "--output", str(output)) == 1
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"]
    shown = capsys.readouterr().out
    assert [each for each in heard if each not in shown] == []
    assert f"stays as it is: {heard[-1]}" in shown


def test_an_engine_that_is_listed_is_confirmed_again(made, shipped, tmp_path):
    """With KV in fp8, the dtype that the profile was made for, and in no other."""
    path, output = made("fp8"), tmp_path / "out" / "profile.json"
    assert confirm(path, "--output", str(output), engine="embedded") == 0
    profile = ReuseProfile.read(output)
    assert profile.engines == ReuseProfile.read(path).engines
    assert len(told(profile, "engine_confirmed")) == 1
    assert len(ReuseProfile.read(path).figures) == 4
    assert profile.namespace["kv_dtype"] == "float8_e4m3fn"
    assert all(each.reused_tokens > 100 for each in reuse_in(EmbeddedEngines(shipped.runner, "fp8"), output))
    assert {(each.reason, each.reused_tokens) for each in reuse_in(shipped, output)} == {("profile_mismatch", 0)}


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
        ({"policy": "exact", "check": None, "head_tokens": 0}, (), "has no check to confirm"),
        ({}, ("--engine", "trtllm"), "tensorrt_llm cannot be imported here"),
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
