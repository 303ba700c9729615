"""The embedded engine under TensorRT-LLM's names answers as itself, and the check finds what goes wrong in it."""

import sys
from dataclasses import replace
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.errors import SemBlendError
from semblend_trt.reuse_profile import ReuseProfile
from tests.validation import trtllm_stand_in
from validation import cases as cases_module
from validation import trtllm_check as check
from validation.arms import COLD, POSITION_FIX, ArmChoices, arms_of
from validation.engines import ended_requests
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import BatchServer, ServingSettings
from validation.models import PROFILE_NAME, shipped_model
from validation.trtllm_check import crowd, judge, judge_verified, serve
from validation.trtllm_engine import TrtllmEngine, TrtllmEngines, open_llm

SMALL = ("--groups", "2", "--rows", "6")
NAMES = ["engine", "smoke", "exactness", "execution", "publication", "validation", "commits", "profile", "verified"]
NAMES += ["concurrency", "endings", "blocks", "pauses", "exchange"]

pytestmark = pytest.mark.usefixtures("_trtllm")


def lines(capsys):
    """The findings on the screen, by name: `holds` or `FAILS`."""
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line[1] for line in words if len(line) > 1 and line[1] in ("holds", "FAILS")}


def failing(findings):
    return [finding.name for finding in findings if not finding.holds]


@pytest.mark.promise(
    "engines",
    "`make trtllm-check` says of smoke, exactness, publication, profile, concurrency and blocks whether they hold",
)
@pytest.mark.promise("policies", "`calibrate` and `confirm` run inside...")
def test_every_check_holds_on_an_engine_that_keeps_the_contract_and_fails_on_one_that_does_not(
    tiny_qwen2_path, monkeypatch, capsys
):
    seen, verified = [], []
    few = (*check._SMALL_CALIBRATION, "--families", "reordered", "--groups", "6", "--tokens", "672", "--risk", "0.7")
    few += ("--shares", "0")
    monkeypatch.setattr(check, "crowd", lambda *_: crowd(2, 8, rows=6))
    monkeypatch.setattr(check, "_SMALL_CALIBRATION", few)
    monkeypatch.setattr(check.greedy, "__defaults__", (4,))
    monkeypatch.setattr(check, "judge", lambda *given: seen.append(given) or judge(*given))
    monkeypatch.setattr(check, "judge_verified", lambda *given: verified.append(given) or judge_verified(*given))
    assert check.main(["--model", str(tiny_qwen2_path), *SMALL]) == 0
    assert lines(capsys) == dict.fromkeys(NAMES, "holds")
    [(asked, found)] = seen
    exact, reused, stock = found["exact"], found["reused"], found["stock"]

    def fails(**changed):
        return failing(judge(asked, found | changed))

    assert fails() == []
    assert fails(exact=replace(exact, tokens=((1,),) * len(exact.tokens))) == ["exactness"]
    assert fails(exact=replace(exact, tokens=((),) * len(exact.tokens))) == ["smoke", "exactness"]
    assert fails(reused=replace(reused, events=())) == ["smoke", "execution"]
    grown = [
        event | {"exact_prefix_tokens": 500 if index == len(asked) - 1 else event["exact_prefix_tokens"]}
        for index, event in enumerate(ended_requests(reused.events))
    ]
    others = [event for event in reused.events if event["event"] != "request_settled"]
    assert fails(reused=replace(reused, events=(*others, *grown))) == ["publication"]
    right = tuple(each.answer for each in asked)
    assert fails(stock=replace(stock, texts=right)) == ["validation"]

    [(asked, stock, served)] = verified
    assert judge_verified(asked, stock, served).holds
    assert not judge_verified(asked, replace(stock, texts=right), served).holds
    assert not judge_verified(asked, stock, replace(served, events=())).holds
    refused = tuple(event | {"reason": "profile_mismatch"} for event in served.events)
    assert not judge_verified(asked, stock, replace(served, events=refused)).holds


def test_a_profile_from_elsewhere_is_confirmed_and_served_with(tmp_path, capsys, monkeypatch):
    # What the crowd and the other arms find is another test's.
    monkeypatch.setattr(check, "serve_crowd", lambda *_: check.Crowded((), (), (), "", "", None, None, ()))
    monkeypatch.setattr(check, "judge", lambda *_: [])
    monkeypatch.setattr(check, "judge_commits", lambda *_: check.Finding("commits", True, ""))
    monkeypatch.setattr(check.greedy, "__defaults__", (4,))
    policies = (None, "verified")
    none = check.Served((), (), ())
    patched = lambda *given: serve(*given) if given[-1].get("SEMBLEND_POLICY") in policies else none  # noqa: E731
    monkeypatch.setattr(check, "serve", patched)
    output = tmp_path / "confirmed.json"
    values = ReuseProfile.read(shipped_model() / PROFILE_NAME)
    values = values.model_copy(update={"bounds": values.bounds[-2:]})
    few = [{"what": "prompts", "groups": 2, "questions": 1, "tokens": 512, "max_tokens": 8}]
    few += [{"what": "confirmed", "family": name} for name in ("reordered", "header_trap")]
    profile = tmp_path / "profile.json"
    values.model_copy(update={"figures": few}).write(profile)
    options = ["--model", str(shipped_model()), "--profile", str(profile), "--output", str(output), *SMALL]
    check.main(options)
    said = lines(capsys)
    assert (said["profile"], said["verified"]) == ("holds", "holds")
    assert ReuseProfile.read(output).engines[-1].startswith("tensorrt_llm/")
    loose = values.model_copy(update={"figures": few, "check": None, "policy": "position_fix", "head_tokens": 0})
    loose.write(profile)
    output.unlink()
    assert check.main(options) == 1
    said = lines(capsys)
    assert said["profile"] == "FAILS"
    assert "verified" not in said
    assert not output.exists()


@pytest.fixture(scope="module")
def rounds():
    return crowd(2, 6, rows=8)


@pytest.mark.promise("engines", "`make trtllm-check` says of smoke, exactness,...")
def test_a_crowd_is_served_as_one_at_a_time_and_leaves_no_block_behind(rounds):
    found = check.serve_crowd(str(shipped_model()), "auto", rounds)
    assert failing(check.judge_crowd(found)) == []
    assert len(found.cold) == len(found.answers) == 24
    assert found.cancelled == "cancelled"
    assert found.failed.startswith("error: ")

    def fails(**changes):
        return failing(check.judge_crowd(replace(found, **changes)))

    assert fails(events=()) == ["concurrency"]
    assert fails(cancelled="length") == fails(failed="stop") == ["endings"]
    assert fails(free_after=None) == fails(free_before=None) == ["blocks"]
    assert fails(free_before=None, free_after=None) == ["blocks"]
    # As wrong as the stock engine is itself when it is asked at once.
    wrong = ((1,) * 6,) * len(found.cold)
    assert fails(answers=wrong) == ["concurrency"]
    assert fails(answers=wrong, at_once=wrong) == []


def test_what_v2_was_not_seen_to_do_is_a_line_that_fails():
    def fails(manager, *events):
        return failing(check.judge_crowded({"manager": manager}, events))

    lookups = [{"event": "lookup", "request_id": each} for each in (1, 2, 1)]
    exchanged = {"event": "blocks_exchanged"}
    settled = {"event": "request_settled", "reason": "load_failed", "request_id": 1}
    assert fails("KVCacheManager") == fails("KVCacheManagerV2", *lookups, exchanged) == []
    assert fails("KVCacheManagerV2", *lookups) == ["exchange"]
    assert fails("KVCacheManagerV2", exchanged) == ["pauses"]
    assert fails("KVCacheManagerV2", exchanged, *lookups, settled) == ["pauses"]
    assert not check.judge_engine(()).holds
    refused = {"event": "engine_attached", "manager": "KVCacheManagerV2", "execution_refusal": "engine_layout"}
    assert not check.judge_engine((refused,)).holds
    assert "execution_refusal engine_layout" in check.judge_engine((refused,)).what


def test_a_crowd_shows_lost_blocks_and_wrong_answers(rounds, monkeypatch):
    monkeypatch.setattr(trtllm_stand_in.LLM, "leaks", 2)
    monkeypatch.setattr(trtllm_stand_in.LLM, "answers_wrongly", True)
    found = check.serve_crowd(str(shipped_model()), "auto", (rounds[0][:3], rounds[1][:3]))
    assert {"blocks", "concurrency"} <= set(failing(check.judge_crowd(found)))
    assert found.free_after == found.free_before - 2


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [
        (None, (), "tensorrt_llm cannot be imported here"),
        (ModuleType("tensorrt_llm"), ("--output", "/dev/full"), "/dev/full cannot be written"),
        (ModuleType("tensorrt_llm"), ("--model", "/nowhere"), "by its full path"),
        (ModuleType("tensorrt_llm"), ("--profile", "/nowhere/none.json"), "none.json cannot be read"),
    ],
)
def test_what_keeps_it_from_an_answer_is_one_sentence_before_any_engine_starts(
    monkeypatch, capsys, module, options, sentence
):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    assert check.main(["--model", str(shipped_model()), *options]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("trtllm-check: ")
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err


def test_an_engine_that_does_not_start_is_a_line_that_fails(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["tensorrt_llm"], "LLM", Mock(side_effect=RuntimeError("no memory")))
    assert check.main(["--model", str(shipped_model()), *SMALL]) == 1
    assert lines(capsys) == {"engine": "FAILS"}


SETTINGS = ServingSettings(str(shipped_model()), max_tokens=4, batch=4)


@pytest.mark.parametrize("name", [COLD, POSITION_FIX])
def test_answers_losses_and_evidence_are_those_of_the_embedded_engine(shipped, name, monkeypatch):
    monkeypatch.setattr(trtllm_stand_in.LLM, "contract", "embedded")  # V2 shares other prefixes
    monkeypatch.setattr(cases_module, "MAX_FORCED_TOKENS", 12)
    trtllm = TrtllmEngines(str(shipped_model()))
    # A text is scored by one request a token; the requests behind it keep their own evidence.
    cases = write_cases(shipped, FamilyRequest(("prose", "reordered"), groups=2, questions=1, tokens=512))
    [arm] = arms_of([name], ArmChoices(8, boundary=1))
    ours, theirs = (BatchServer(engines, cases, SETTINGS).answers(arm) for engines in (shipped, trtllm))
    assert list(ours) == list(theirs)
    for case in cases:
        left, right = ours[case.id], theirs[case.id]
        assert left.loss == pytest.approx(right.loss, abs=1e-4)
        assert left.text == right.text
        torch.testing.assert_close(left.logits, right.logits, atol=1e-3, rtol=0)
        assert replace(left.reuse, exact_prefix_tokens=0) == replace(right.reuse, exact_prefix_tokens=0)
        assert (right.reuse.reused_tokens > 100) == (name == POSITION_FIX)


def test_an_audit_log_that_misses_requests_is_not_read_as_their_evidence(shipped, monkeypatch):
    cases = write_cases(shipped, FamilyRequest(("reordered",), groups=1, questions=1, tokens=512))
    [arm] = arms_of([POSITION_FIX], ArmChoices(8, boundary=1))
    monkeypatch.setattr("validation.measurement.ended_requests", lambda events, n: ended_requests(events[:-8], n))
    with pytest.raises(SemBlendError, match="audit log has the end of"):
        BatchServer(shipped, cases, SETTINGS).answers(arm)


@pytest.mark.parametrize(("salts", "named"), [([None, None], set()), (["a", None], {"cache_salt"})])
def test_salts_are_named_only_where_there_are_some(salts, named):
    llm = Mock(**{"generate.return_value": []})
    with pytest.raises(SemBlendError, match="zip"):
        TrtllmEngine(llm, None).generate([[1], [2]], SamplingParams(max_tokens=1), salts)
    assert set(llm.generate.call_args.kwargs) - {"use_tqdm"} == named


def test_what_the_engine_raises_is_one_sentence():
    llm = Mock(**{"generate.side_effect": RuntimeError("out of memory")})
    with pytest.raises(SemBlendError, match="TensorRT-LLM gave no answer: out of memory"):
        TrtllmEngine(llm, None).generate([[1]], SamplingParams())
    with pytest.raises(SemBlendError, match=r"does not start with model .*unknown_option"):
        open_llm(str(shipped_model()), None, {}, unknown_option=1)
