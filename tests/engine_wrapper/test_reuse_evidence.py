"""Output, report, audit log and metrics agree on what was reused; a reuse profile decides what may be."""

import hashlib
import json
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from semblend_trt.reuse_profile import ProfileBound, ProfileLevel, ReuseProfile
from tests.builders import engine as serving
from tests.builders.engine import DONOR, KEPT_BY_LEVEL, NONE_KEPT, NONE_SAMPLED, SHIFTED, SOME_KEPT, serve, teach
from validation.models import PROFILE_NAME, shipped_model

TOKEN_KINDS = ("offered", "sampled", "checked", "reused", "recomputed", "exact_prefix")


def report_of(llm, output):
    return llm.connector_scheduler.reuse_of(output.request_id)


def counted():
    return {kind: REGISTRY.get_sample_value("semblend_tokens_total", {"kind": kind}) for kind in TOKEN_KINDS}


@pytest.mark.promise(
    "policies", "Without a profile, or with one that does not hold, only identical text from position 0 is reused"
)
@pytest.mark.parametrize(
    ("module", "change", "reason"),
    [
        ("engine_wrapper.connector", lambda path: of_another_model(path), "profile_mismatch"),
        ("engine_wrapper.connector", lambda path: path.write_text("{"), "profile_unreadable"),
        ("semblend_trt.connector", lambda path: None, "check_needs_wrapper"),
    ],
    ids=["another model's", "broken", "stock engine"],
)
def test_a_profile_that_cannot_be_used_costs_approximate_reuse_and_no_more(shifted, profile, module, change, reason):
    path = profile("position_fix")
    change(path)
    _, output = shifted(module, PROFILE=path)
    assert (output.reused_tokens, output.reuse_outcome, output.reuse_reason) == (0, "backend_declined_reuse", reason)


@pytest.mark.promise("policies", "Without a profile, or with one...")
def test_without_a_profile_nothing_is_moved(shifted):
    assert shifted()[1].reuse_reason == "no_profile"


def of_another_model(path):
    made = ReuseProfile.read(path)
    made.model_copy(update={"namespace": {**made.namespace, "model_revision": "another"}}).write(path)


@pytest.mark.parametrize(
    ("options", "reused", "reason"),
    [({"cache_salt": "salt"}, 200, None), ({"lora_request": "legal"}, 0, "profile_mismatch")],
)
def test_a_request_with_an_adapter_does_not_use_the_profile(engine, profile, options, reused, reason):
    llm = engine(PROFILE=profile("position_fix"), lora_config={"legal": 1})
    serve(llm, DONOR, **options)
    output = serve(llm, SHIFTED, **options)
    assert (output.reused_tokens, output.reuse_reason) == (reused, reason)


@pytest.mark.promise("commands", "Every answer has a receipt, in...")
@pytest.mark.promise(
    "commands", "The audit log says of every request what the metrics count; a log that fails costs no request"
)
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
        ({}, NONE_SAMPLED, {"offered": 200, "sampled": 53, "checked": 200, "reused": 0, "recomputed": 200}),
    ],
)
def test_output_report_log_and_metrics_agree(engine, profile, variables, check, figures):
    if check is not None:
        variables = {"PROFILE": profile(check=check)}
    llm = engine(**variables)
    teach(llm, DONOR)
    before = counted()
    output = serve(llm, SHIFTED)
    after = counted()

    report = report_of(llm, output)
    told = {name: getattr(report, f"{name}_tokens") for name in TOKEN_KINDS if name != "exact_prefix"}
    if figures is None:
        figures = told
        assert 0 < told["reused"] < told["checked"] == told["offered"] == told["reused"] + told["recomputed"]
    figures = {"sampled": 0, **figures}
    assert told == figures
    assert {kind: after[kind] - before[kind] for kind in TOKEN_KINDS} == {**figures, "exact_prefix": 0}
    assert output.reused_tokens == report.reused_tokens
    assert output.computed_tokens == len(SHIFTED) - figures["reused"]
    assert (output.reuse_outcome, output.reuse_reason) == (report.outcome, report.reason)

    if not figures["reused"]:
        assert (report.outcome, report.reason) == ("backend_declined_reuse", "deviation")
    assert llm.connector_scheduler.outcomes.of(output.request_id) == report
    event = next(each for each in engine.events("request_settled")[::-1] if each["request_id"] == output.request_id)
    assert {name: event[name] for name in report.figures} == json.loads(json.dumps(report.figures))
    assert (event["outcome"], event["reason"]) == (report.outcome, report.reason)
    placed = [each for each in engine.events("materialized") if each["request_id"] == output.request_id]
    used = figures["reused"] * llm.executor.model_runner.facts.num_layers
    assert [each["materialized"] for each in placed] == ([used] if used else [])
    assert output.receipt == report.receipt
    assert {name: output.receipt[f"{name}_tokens"] for name in told} == told
    used = variables.get("PROFILE")
    digest = None if used is None else hashlib.sha256(Path(used).read_bytes()).hexdigest()
    assert (output.receipt["policy"], output.receipt["profile"]) == (variables.get("POLICY", "verified"), digest)


@pytest.mark.promise("policies", "Of a profile's bounds the loosest...")
@pytest.mark.promise(
    "policies",
    "A plan whose sample deviates by more than the bound's levels allow, or by no number, is computed whole and "
    "counted as `risk_above_bound`",
)
@pytest.mark.parametrize(
    ("limit", "asked", "is_reused", "reason"),
    [
        (1e6, {"MAX_KL": 0.01}, True, None),
        (1e-9, {"MAX_KL": 0.01}, False, "risk_above_bound"),
        (1e6, {"MAX_KL": 0.005}, False, "no_bound"),
        (1e6, {"MAX_KL": 0.01, "RISK": 0.01}, False, "no_bound"),
        (1e-9, {"MAX_KL": "unbounded"}, True, None),
    ],
)
def test_the_bound_for_the_settings_decides_and_is_in_the_receipt(shifted, profile, limit, asked, is_reused, reason):
    bound = ProfileBound(max_kl=0.01, risk=0.05, levels=[ProfileLevel(deviation=limit, share=0.0)])
    _, output = shifted(PROFILE=profile(check=KEPT_BY_LEVEL, bounds=[bound]), **asked)
    assert (output.reused_tokens > 0, output.reuse_reason) == (is_reused, reason)
    is_bound = asked == {"MAX_KL": 0.01}
    assert (output.receipt["max_kl"], output.receipt["risk"]) == ((0.01, 0.05) if is_bound else (None, None))
    assert (output.receipt["sampled_deviation"] > 0.0) == is_bound


@pytest.mark.known_defect(22)
@pytest.mark.parametrize("asked", ["auto", "bfloat16"])
def test_a_namespace_names_the_dtype_that_runs(engine, asked):
    assert engine(dtype=asked).connector_scheduler.namespace.extra["compute_dtype"] == "float32"


@pytest.mark.promise("policies", "A profile that is replaced under a running engine counts from its next start on")
def test_a_profile_that_is_replaced_counts_from_the_next_start_on(engine, profile):
    path = profile(check=NONE_KEPT)
    for reused in (0, 200):
        llm, digest = engine(PROFILE=path), hashlib.sha256(path.read_bytes()).hexdigest()
        teach(llm, DONOR)
        profile("position_fix")
        output = serve(llm, SHIFTED)
        assert (output.reused_tokens, report_of(llm, output).profile) == (reused, digest)


@pytest.mark.promise("policies", "`verified` reuses more than exact text...")
@pytest.mark.parametrize(
    "how", ["edited", "with a new digest", "without a digest", "with a check that passes anything"]
)
def test_the_shipped_profile_changed_to_check_nothing_reuses_nothing(engines_of, tmp_path, how):
    """A stranger's file that binds to the same model: header traps are answered as cold, and nothing is unchecked."""
    path, held = tmp_path / "profile.json", ReuseProfile.read(shipped_model() / PROFILE_NAME)
    blind = {"check": held.check.model_copy(update={"threshold": 1.0, "max_span_share": 1.0, "window_threshold": None})}
    terms = blind if how.endswith("anything") else {"policy": "position_fix", "check": None, "head_tokens": 0}
    changed = held.model_copy(update=terms | ({"digest": None} if how == "without a digest" else {}))
    path.write_text(changed.model_dump_json())
    if how.startswith("with a"):
        changed.write(path)
    engines = engines_of(str(shipped_model()), dtype="float32")
    cold, llm = engines.cold(), engines(PROFILE=path)
    cases = serving.cases_of(cold.tokenizer, "header_trap", groups=2)
    for case in cases:
        teach(llm, *case.donors)
    for case in cases:
        output, expected = serve(llm, case.prompt), serve(cold, case.prompt)
        assert output.outputs[0].text == expected.outputs[0].text
        assert (output.reused_tokens, output.reuse_reason) == (0, "profile_evidence")
