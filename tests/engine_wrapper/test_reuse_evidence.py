"""What reuse did is said alike by the request's output, the report, the ledger, the audit log and the metrics; and a
reuse profile decides what may be reused, for the engine that it was made for."""

from __future__ import annotations

import json

import pytest
from prometheus_client import REGISTRY

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.engine_wrapper.prompts import DOCUMENT, DONOR, SHIFTED, text

PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)
TOKEN_KINDS = ("offered", "checked", "reused", "recomputed", "exact_prefix")


# A random model's KV deviates by about 1 when its context changes: the highest threshold keeps some of the tokens.
SOME_KEPT, NONE_KEPT = ProfileCheck(layer=1, threshold=1.0), ProfileCheck(layer=1, threshold=0.0)


@pytest.fixture
def engine(tiny_qwen2_path, monkeypatch, tmp_path):
    """Builds engines over one tiny model and shuts them down; each writes the same audit log."""
    engines: list[LLM] = []
    monkeypatch.setenv("SEMBLEND_AUDIT_PATH", str(tmp_path / "audit.jsonl"))

    def build(module="engine_wrapper.connector", **variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"SEMBLEND_{name}", str(value))
        llm = LLM(
            model=tiny_qwen2_path,
            dtype="float32",
            device="cpu",
            kv_connector_config=KvCacheConnectorConfig.ours(module),
            kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=4096),
        )
        engines.append(llm)
        return llm

    yield build
    for llm in engines:
        llm.shutdown()


@pytest.fixture
def profile(engine, tmp_path):
    """Makes a profile of the tiny model's engine and returns its path."""
    llm = engine()

    def make(policy, **fields):
        namespace, geometry = llm.connector_scheduler.namespace, llm.executor.pool.geometry
        path = tmp_path / "reuse-profile.json"
        ReuseProfile.made_for(namespace, geometry, policy=policy, **fields).write(path)
        return path

    return make


def serve(llm, prompt):
    output = llm.generate([prompt], PREFILL)[0]
    llm.settle()
    return output


def report_of(llm, output):
    return llm.connector_scheduler.reuse_of(output.request_id)


def counted() -> dict[str, float]:
    return {kind: REGISTRY.get_sample_value("semblend_tokens_total", {"kind": kind}) for kind in TOKEN_KINDS}


def settled_events(tmp_path):
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "request_settled"]


@pytest.mark.parametrize(
    ("policy", "fields", "reused"),
    [
        ("position_fix", {}, 200),
        ("boundary", {"boundary": 2}, 200),
        ("verified", {"check": NONE_KEPT}, 0),
        ("exact", {}, 0),
    ],
)
def test_a_profile_decides_what_the_default_policy_reuses(engine, profile, policy, fields, reused):
    llm = engine(PROFILE=profile(policy, **fields))
    serve(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert output.reused_tokens == reused
    assert output.computed_tokens == len(SHIFTED) - reused


def test_without_a_profile_only_identical_text_from_the_start_is_reused(engine):
    llm = engine()
    serve(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_outcome) == (0, "backend_declined_reuse")
    assert output.reuse_reason == "no_profile"
    assert serve(llm, text(7, 300)).reuse_reason == "no_donor_match"


def test_a_profile_of_another_model_is_refused(engine, profile, tmp_path):
    path = profile("position_fix")
    values = json.loads(path.read_text())
    values["namespace"]["model_revision"] = "another"
    path.write_text(json.dumps(values))
    llm = engine(PROFILE=path)
    serve(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_reason) == (0, "profile_mismatch")


def test_a_broken_profile_costs_approximate_reuse_and_no_more(engine, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{")
    llm = engine(PROFILE=path)
    serve(llm, DONOR)
    assert serve(llm, SHIFTED).reuse_reason == "profile_unreadable"


def test_a_request_with_an_adapter_does_not_use_the_profile(engine, profile):
    llm = engine(PROFILE=profile("position_fix"))
    scheduler = llm.connector_scheduler
    own = scheduler.namespace
    assert scheduler._match(own.for_request("salt", None)).profile is not None
    assert scheduler._match(own.for_request(None, "legal")).refusal == "profile_mismatch"


def test_a_stock_engine_reuses_exact_text_whatever_the_profile_says(engine, profile):
    path = profile("position_fix")
    llm = engine("semblend_trt.connector", PROFILE=path)
    serve(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_reason) == (0, "check_needs_wrapper")


@pytest.mark.parametrize(
    ("variables", "check", "figures"),
    [
        ({}, SOME_KEPT, None),
        ({}, NONE_KEPT, {"offered": 200, "checked": 200, "reused": 0, "recomputed": 200}),
        ({"POLICY": "epic", "EPIC_TOKENS": 32}, None, {"offered": 200, "checked": 0, "reused": 168, "recomputed": 32}),
        (
            {"POLICY": "cacheblend", "CACHEBLEND_SHARE": 0.25},
            None,
            {"offered": 200, "checked": 200, "reused": 150, "recomputed": 50},
        ),
        ({"POLICY": "position_fix"}, None, {"offered": 200, "checked": 0, "reused": 200, "recomputed": 0}),
    ],
)
def test_everyone_tells_the_same(engine, profile, tmp_path, variables, check, figures):
    if check is not None:
        variables = {"PROFILE": profile("verified", check=check)}
    llm = engine(**variables)
    serve(llm, DONOR)
    before = counted()
    output = serve(llm, SHIFTED)
    after = counted()

    report = report_of(llm, output)
    told = {name: getattr(report, f"{name}_tokens") for name in ("offered", "checked", "reused", "recomputed")}
    if figures is None:
        figures = told
        assert 0 < told["reused"] < told["checked"] == told["offered"] == told["reused"] + told["recomputed"]
    assert told == figures
    assert {kind: after[kind] - before[kind] for kind in TOKEN_KINDS} == {**figures, "exact_prefix": 0}
    assert output.reused_tokens == report.reused_tokens
    assert output.computed_tokens == len(SHIFTED) - figures["reused"]
    assert (output.reuse_outcome, output.reuse_reason) == (report.outcome, report.reason)

    assert llm.connector_scheduler.outcomes.of(output.request_id) == report
    llm.shutdown()
    event = next(event for event in settled_events(tmp_path)[::-1] if event["request_id"] == output.request_id)
    assert {name: event[name] for name in report.figures} == report.figures
    assert (event["outcome"], event["reason"]) == (report.outcome, report.reason)


def test_a_dropped_plan_is_declined_because_of_its_deviation(engine, profile):
    llm = engine(PROFILE=profile("verified", check=NONE_KEPT))
    serve(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert (output.reuse_outcome, output.reuse_reason) == ("backend_declined_reuse", "deviation")
    assert llm.connector_scheduler.outcomes.reasons()["deviation"] == 1


def test_the_largest_deviation_kept_is_within_the_threshold(engine, profile):
    llm = engine(PROFILE=profile("verified", check=SOME_KEPT))
    serve(llm, DONOR)
    assert 0 < report_of(llm, serve(llm, SHIFTED)).largest_kept <= 1.0


def test_evidence_that_never_arrives_is_said_to_be_unknown(engine, profile):
    llm = engine(PROFILE=profile("verified", check=SOME_KEPT))
    llm.executor.model_runner.evidence_sink = None  # as on an engine whose wrapper runs in another process
    serve(llm, DONOR)
    report = report_of(llm, serve(llm, SHIFTED))
    assert (report.offered_tokens, report.reused_tokens) == (200, 0)
    assert report.checked_tokens is report.recomputed_tokens is report.largest_kept is None
    assert report.outcome == "backend_materialized_reuse"


def test_evidence_of_requests_that_nobody_knows_is_dropped(engine, profile):
    llm = engine(PROFILE=profile("verified", check=SOME_KEPT))
    serve(llm, DONOR)
    serve(llm, SHIFTED)
    scheduler = llm.connector_scheduler
    serve(llm, DOCUMENT)
    assert not scheduler._runtime.evidence
    assert len(scheduler._requests) == 0


def test_the_engine_knows_which_checks_to_prepare(engine):
    assert engine(POLICY="cacheblend").executor.check_layers == (1,)
    assert engine(POLICY="position_fix").executor.check_layers == ()


@pytest.mark.known_defect(22)
def test_a_namespace_names_the_dtype_that_runs(tiny_qwen2_path):
    connector = KvCacheConnectorConfig.ours()
    for asked in ("auto", "bfloat16"):
        with LLM(
            model=tiny_qwen2_path,
            runner=ModelRunner(tiny_qwen2_path, "float32", "cpu"),
            dtype=asked,
            kv_connector_config=connector,
        ) as llm:
            assert llm.connector_scheduler.namespace.extra["compute_dtype"] == "float32"
