"""The policy verified inside vLLM: traps are seen, harmless text is reused, and nothing approximate is left behind."""

import numpy as np
import pytest

from engine_wrapper import deviation_check
from engine_wrapper.embedded.request import SamplingParams
from engine_wrapper.layer_schedule import AttentionMass
from engine_wrapper.token_schedule import SequenceWork
from engine_wrapper.vllm import attention, planned_forward
from engine_wrapper.vllm.attention import VllmRows
from semblend_trt.reuse_profile import ProfileBound, ProfileLevel, ReuseProfile
from tests.builders.engine import Engines, cases_of
from tests.builders.tape import capture_on_a_cpu
from tests.builders.vllm import SHORT
from tests.engine_wrapper.watching import watched
from validation.models import shipped_model

GROUPS, TOKENS = 6, 700


def answers(served, cases, *, donors):
    tokenizer = served.llm.get_tokenizer()
    encoded = {case.id: tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases}
    if donors:
        texts = [donor for case in cases for donor in case.donors]
        served.ask(*(tokenizer.encode(text, add_special_tokens=False) for text in texts), max_tokens=1)
        served.settle()
    found = served.ask(*encoded.values())
    texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in found]
    right = sum(text.strip() == case.reference for text, case in zip(texts, cases, strict=True))
    wrong = sum(text.strip() == case.donor_answer for text, case in zip(texts, cases, strict=True))
    return right, wrong, sum(each.cached for each in found)


@pytest.mark.every_version
def test_a_trap_is_seen_by_verified_and_not_by_position_fix(engine):
    served = engine(None, enable_prefix_caching=False)
    cases = cases_of(served.llm.get_tokenizer(), "header_trap")
    cold, _, _ = answers(served, cases, donors=False)
    assert cold >= GROUPS - 1
    served = engine("position_fix")
    assert answers(served, cases, donors=True)[0] == 0
    served = engine("verified", kept=True)
    right, followed, _ = answers(served, cases, donors=True)
    assert (right, followed) == (cold, 0)


@pytest.fixture
def sampled(profile, tmp_path, monkeypatch, trial):
    """Settings of a profile with a sample, which is the same one for all requests."""
    monkeypatch.setattr("semblend_trt.discovery.planner.secrets.randbits", lambda _: 7)
    found = ReuseProfile.read(profile)
    check = found.check.model_copy(update={"sample_every": 4, "sample_threshold": 0.1})
    found.model_copy(update={"check": check}).write(tmp_path / "sampled.json")
    return {"policy": "verified", "profile": str(tmp_path / "sampled.json")}


def bounded(profile, path, share, **check):
    """Settings of the sampled profile, its `check` changed, with a bound that computes this share; above 1 all."""
    level = ProfileLevel(deviation=1e6 if share <= 1 else 0.0, share=min(share, 1.0))
    bound = ProfileBound(max_kl=1.0, risk=0.5, levels=[level])
    found = ReuseProfile.read(profile)
    own = found.check.model_copy(update=check)
    found.model_copy(update={"bounds": [bound], "check": own}).write(path)
    return {"policy": "verified", "profile": str(path), "max_kl": 1.0, "risk": 0.5}


def told(report):
    return report.offered_tokens, report.sampled_tokens, report.checked_tokens, report.recomputed_tokens


FAMILIES = "reordered", "header_trap"


def in_the_embedded_engine(profile, tmp_path, families, **own):
    """What the embedded engine finds of each prompt by a profile."""
    engines, found = Engines(tmp_path / "audit.jsonl", model=str(shipped_model()), dtype="float32"), []
    settings = {"MIN_DONOR_TOKENS": SHORT["min_donor_tokens"], "MIN_SPAN": SHORT["min_span_tokens"], **own}
    cache = {"tokens_per_block": 32, "enable_partial_reuse": False}
    llm = engines(cache=cache, PROFILE=profile, HOST_BYTES=SHORT["host_bytes"], **settings)

    def ask(texts):
        tokens = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = llm.generate(tokens, [SamplingParams(max_tokens=1)] * len(tokens))
        llm.settle()
        return [told(llm.connector_scheduler.reuse_of(output.request_id)) for output in outputs]

    for family in families:
        cases = cases_of(llm.tokenizer, family)
        ask([donor for case in cases for donor in case.donors])
        found += ask([case.prompt for case in cases])
    engines.shutdown()
    return found


@pytest.mark.promise(
    "engines",
    "In vLLM a check's sample finds what it does in the embedded engine, in chunks and beside other plans; where "
    "our attention cannot stand for vLLM's, every token is checked",
)
@pytest.mark.parametrize("is_captured", [pytest.param(False, marks=pytest.mark.every_version), True])
def test_samples_find_what_they_do_in_the_embedded_engine(engine, sampled, tmp_path, monkeypatch, is_captured):
    expected = in_the_embedded_engine(sampled["profile"], tmp_path, FAMILIES)
    captured = capture_on_a_cpu(monkeypatch) if is_captured else []
    served = engine("boundary", sampled, max_num_batched_tokens=128, max_num_seqs=4)
    rows = watched(monkeypatch, VllmRows, "enter", lambda _, __, stage, **___: stage.num_rows)
    monkeypatch.setattr(deviation_check, "ROWS_PER_GAP", 1000)
    found = []
    for family in FAMILIES:
        right, followed, _ = answers(served, cases_of(served.llm.get_tokenizer(), family), donors=True)
        assert (right, followed) == (GROUPS, 0)
        reports = [served.report(i) for i in reversed(range(GROUPS))]
        found += map(told, reports)
    assert found == expected
    assert any(checked == 0 < sample < offered / 2 for offered, sample, checked, *_ in found[:GROUPS])
    assert all(0 < sample < checked < recomputed for _, sample, checked, recomputed in found[GROUPS:])
    assert max(rows) <= served.core.scheduler.max_num_scheduled_tokens
    assert bool(captured) == is_captured


@pytest.mark.promise("policies", "If a check compares its sample...")
@pytest.mark.parametrize(
    ("options", "compares_all", "is_captured"),
    [
        pytest.param({"max_num_batched_tokens": 128, "max_num_seqs": 4}, True, False, marks=pytest.mark.every_version),
        ({}, False, False),
        ({"max_num_batched_tokens": 128, "max_num_seqs": 4}, False, True),
    ],
    ids=str,
)
def test_levels_choose_by_the_attention_that_the_embedded_engine_finds(
    engine, sampled, tmp_path, monkeypatch, options, compares_all, is_captured
):
    settings, found = bounded(sampled["profile"], tmp_path / "bounded.json", 0.3, compares_all=compares_all), []
    weighed = SequenceWork.weighed
    monkeypatch.setattr(SequenceWork, "weighed", lambda own, mass: found.append(mass.copy()) or weighed(own, mass))
    in_the_embedded_engine(settings["profile"], tmp_path, FAMILIES[:1], MAX_KL=1.0, RISK=0.5)
    wanted, found[:] = list(found), []
    captured = capture_on_a_cpu(monkeypatch) if is_captured else []
    read = watched(monkeypatch, AttentionMass, "read", lambda *_: None)
    served = engine("boundary", settings, **options)
    cases = cases_of(served.llm.get_tokenizer(), "reordered")
    assert answers(served, cases, donors=True)[:2] == (GROUPS, 0)
    del found[0]  # of the self-check
    assert len(found) == len(wanted) >= GROUPS
    assert sorted(map(np.sum, found)) == pytest.approx(sorted(map(np.sum, wanted)), rel=1e-3)
    for each in found:
        (same,) = [other for other in wanted if len(other) == len(each) and np.allclose(other, each, atol=1e-2)]
        assert np.argsort(same)[-20:].tolist() == np.argsort(each)[-20:].tolist()
    reports = [served.report(i) for i in range(GROUPS)]
    assert all(bool(report.checked_tokens) == compares_all for report in reports)
    compared = [report.checked_tokens or report.offered_tokens for report in reports]
    assert all(own.recomputed_tokens >= round(0.3 * all_) > 0 for own, all_ in zip(reports, compared, strict=True))
    assert (bool(captured), bool(read)) == (is_captured, is_captured)
    assert not served.runtime.faults


@pytest.mark.promise("engines", "In vLLM a check's sample finds...")
@pytest.mark.parametrize("problem", ["alibi", "no kernel for this card"])
def test_checks_compare_every_token_where_our_attention_cannot_stand_for_the_engines(
    engine, sampled, problem, monkeypatch, caplog
):
    def fails(*_):
        raise RuntimeError(problem)

    if problem == "alibi":
        monkeypatch.setattr(planned_forward, "sample_refusal", lambda _: problem)
    else:
        monkeypatch.setattr(attention, "sparse_prefill", fails)
    served = engine("boundary", sampled)
    cases = cases_of(served.llm.get_tokenizer(), "header_trap")
    assert answers(served, cases, donors=True)[:2] == (GROUPS, 0)
    found = [told(served.report(i)) for i in range(GROUPS)]
    assert all(sample == 0 < checked <= offered for offered, sample, checked, _ in found)
    assert f"checks compare every token on this engine, without sample: {problem}" in caplog.text
