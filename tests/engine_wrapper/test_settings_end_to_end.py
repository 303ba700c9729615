"""Switches and bounds that users know by name do what documentation says, seen from outside a served engine."""

from __future__ import annotations

import json

import pytest
import torch
from prometheus_client import REGISTRY

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from tests.engine_wrapper.prompts import DOCUMENT, DONOR, INSTRUCTION, OTHER_INSTRUCTION, QUESTION, SHIFTED, text

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, return_generation_logits=True)
PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)
BLOCK = 16


@pytest.fixture
def engine(tiny_qwen2_path, monkeypatch, tmp_path):
    """Builds engines under the settings given by their names, and shuts them down."""
    engines: list[LLM] = []
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    monkeypatch.setenv("SEMBLEND_AUDIT_PATH", str(tmp_path / "audit.jsonl"))

    def build(*, connector=True, max_tokens=4096, **settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"SEMBLEND_{name}", str(value))
        config = KvCacheConnectorConfig.ours()
        llm = LLM(
            model=tiny_qwen2_path,
            dtype="float32",
            device="cpu",
            kv_connector_config=config if connector else None,
            kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK, enable_block_reuse=connector, max_tokens=max_tokens),
        )
        engines.append(llm)
        return llm

    yield build
    for llm in engines:
        llm.shutdown()


def serve(llm, prompt, params=GREEDY):
    (output,) = llm.generate([prompt], params)
    llm.settle()
    return output


def assert_equal_to_cold(engine, output, prompt):
    expected = serve(engine(connector=False), prompt)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    logits, cold = output.outputs[0].generation_logits[0], expected.outputs[0].generation_logits[0]
    assert torch.allclose(logits, cold, atol=1e-4, rtol=0)


def lookups(llm, tmp_path):
    """Closes the engine and returns its audit log's lookup events."""
    llm.shutdown()
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "lookup"]


def test_without_enabled_everything_is_cold_and_nothing_is_kept(engine):
    llm = engine(ENABLED=0)
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_outcome, output.reuse_reason) == (0, "cold_fallback", "disabled")
    assert llm.connector_scheduler.donor_index is None
    assert_equal_to_cold(engine, output, SHIFTED)


def test_discovery_only_reports_donors_and_places_nothing(engine, tmp_path):
    llm = engine(DISCOVERY_ONLY=1)
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_outcome) == (0, "semantic_discovery_only")
    assert output.computed_tokens == len(SHIFTED)
    assert llm.connector_scheduler.donor_index.catalog.stats().leases == 0
    assert_equal_to_cold(engine, output, SHIFTED)
    assert lookups(llm, tmp_path)[-1]["diagnostics"]["tokens_reused"] == len(DOCUMENT)


def test_fuzzy_chunks_reuse_a_document_with_changed_tokens(engine, tmp_path):
    edited = [token ^ (index % 40 == 39) for index, token in enumerate(DOCUMENT)]
    prompt = OTHER_INSTRUCTION + edited + QUESTION
    plain = engine(FUZZY_CHUNKS=0)
    serve(plain, DONOR, PREFILL)
    assert serve(plain, prompt).reuse_reason == "no_donor_match"
    llm = engine(FUZZY_CHUNKS=1, FUZZY_MARGIN=3)
    serve(llm, DONOR, PREFILL)
    output = serve(llm, prompt)
    assert output.reused_tokens == 39 + 4 * (39 - 3)
    assert output.computed_tokens == len(prompt) - output.reused_tokens
    (chunk,) = lookups(llm, tmp_path)[-1]["diagnostics"]["fuzzy_chunks"]
    assert (chunk["runs"], chunk["tokens_reused"]) == (5, output.reused_tokens)


def test_a_strict_prefix_boundary_promises_whole_blocks_without_a_hole(engine):
    llm = engine(STRICT_PREFIX_BOUNDARY=1)
    serve(llm, DONOR, PREFILL)
    shifted = serve(llm, SHIFTED)
    assert (shifted.reused_tokens, shifted.reuse_reason) == (0, "strict_prefix_boundary")
    assert_equal_to_cold(engine, shifted, SHIFTED)
    from_start = serve(llm, DOCUMENT + text(5, 20))
    assert from_start.reused_tokens == len(DOCUMENT) // BLOCK * BLOCK
    assert from_start.computed_tokens == len(DOCUMENT) + 20 - from_start.reused_tokens


def test_exact_materialization_only_places_what_a_cold_run_would_compute(engine, tmp_path):
    llm = engine(EXACT_MATERIALIZATION_ONLY=1, max_tokens=512)
    serve(llm, DONOR, PREFILL)
    shifted = serve(llm, SHIFTED)
    assert (shifted.reused_tokens, shifted.reuse_outcome) == (0, "semantic_discovery_only")
    assert_equal_to_cold(engine, shifted, SHIFTED)
    for seed in range(20, 24):
        serve(llm, text(seed, 400), PREFILL)  # pushes the donor's blocks out of the engine's own cache
    prompt = DONOR + QUESTION
    output = serve(llm, prompt)
    assert (output.cached_tokens, output.reused_tokens) == (0, len(DONOR))
    assert_equal_to_cold(engine, output, prompt)
    reported = [event["diagnostics"] for event in lookups(llm, tmp_path) if event["kind"] == "discovery_only"]
    assert [each["tokens_reused"] for each in reported] == [len(DOCUMENT)]


def test_an_audit_log_that_cannot_be_written_is_counted_until_the_engine_ends(engine, tmp_path):
    def lost():
        return REGISTRY.get_sample_value("semblend_audit_dropped_total", {"reason": "not_written"}) or 0

    (tmp_path / "file").write_text("")
    before = lost()
    llm = engine(AUDIT_PATH=tmp_path / "file" / "audit.jsonl")
    assert len(serve(llm, SHIFTED).outputs[0].token_ids) == GREEDY.max_tokens
    llm.shutdown()
    assert lost() - before >= 3  # started, lookup, settled


@pytest.mark.known_defect(20)
def test_max_donors_forgets_the_least_recently_used(engine):
    llm = engine(MAX_DONORS=2)
    documents = [text(100 + number, 200) for number in range(3)]
    for document in documents:
        serve(llm, document, PREFILL)
        assert llm.connector_scheduler.donor_index.catalog.stats().ready <= 2
    # The exact part of these, their head, is too short to become a donor and push another out.
    reused = [serve(llm, INSTRUCTION + document, PREFILL).reused_tokens for document in reversed(documents)]
    assert reused == [len(DOCUMENT) - 1, len(DOCUMENT) - 1, 0]


@pytest.mark.parametrize(("ratio", "reason"), [(0.68, None), (0.69, "low_reuse")])
def test_min_reuse_ratio_is_of_what_the_engine_lacks(engine, ratio, reason):
    llm = engine(MIN_REUSE_RATIO=ratio)
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)  # 200 of 293 tokens
    assert (output.reused_tokens, output.reuse_reason) == (0 if reason else len(DOCUMENT), reason)


@pytest.mark.parametrize(("min_span", "reused"), [(200, 200), (201, 0)])
def test_min_span_is_the_shortest_run_that_is_reused(engine, min_span, reused):
    llm = engine(MIN_SPAN=min_span)
    serve(llm, DONOR, PREFILL)
    assert serve(llm, SHIFTED).reused_tokens == reused


@pytest.mark.known_defect(17)
def test_a_lookup_past_its_deadline_costs_a_cold_prefill(engine):
    llm = engine(LOOKUP_DEADLINE_MS=0.001)
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_reason) == (0, "lookup_timeout")
    assert output.reuse_outcome == "backend_declined_reuse"
    assert llm.connector_scheduler.outcomes.reasons()["lookup_timeout"] == 2
    assert_equal_to_cold(engine, output, SHIFTED)
