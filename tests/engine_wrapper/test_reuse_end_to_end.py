"""The whole path on a tiny model: donors are kept, found at another position, moved, and the rest is computed.

Several of these name a defect of public connectors that the same situation triggers.
"""

from __future__ import annotations

import json

import pytest
import torch

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from tests.engine_wrapper.prompts import DOCUMENT, DONOR, OTHER_INSTRUCTION, QUESTION, SHIFTED, text

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, return_generation_logits=True)
PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)
BLOCK = 16
NUM_LAYERS = 3
SECOND_DOCUMENT = text(11, 150)


@pytest.fixture
def engine(tiny_qwen2_path, monkeypatch):
    """Builds engines over one tiny model and shuts them down."""
    engines: list[LLM] = []

    def build(policy="position_fix", module="engine_wrapper.connector", boundary=0, reuse=True, **arguments):
        monkeypatch.setenv("SEMBLEND_POLICY", policy)
        monkeypatch.setenv("SEMBLEND_RECOMPUTE_BOUNDARY_LAYER", str(boundary))
        connector = None
        if module is not None:
            connector = KvCacheConnectorConfig.ours(module)
        llm = LLM(
            model=tiny_qwen2_path,
            dtype="float32",
            device="cpu",
            kv_connector_config=connector,
            kv_cache_config=KvCacheConfig(
                tokens_per_block=BLOCK, enable_block_reuse=reuse, max_tokens=arguments.pop("max_tokens", 4096)
            ),
            **arguments,
        )
        engines.append(llm)
        return llm

    yield build
    for llm in engines:
        llm.shutdown()


@pytest.fixture
def cold(engine):
    """An engine that reuses nothing."""
    return engine(module=None, reuse=False)


def serve(llm, prompt, params=GREEDY, **options):
    output = llm.generate([prompt], params, **options)[0]
    llm.settle()
    return output


def token_ids(output):
    return output.outputs[0].token_ids


def first_logits(output):
    return output.outputs[0].generation_logits[0]


def outcome(llm, output):
    assert output.reuse_outcome == llm.connector_scheduler.reuse_of(output.request_id).outcome
    return output.reuse_outcome


def pool_of(llm):
    return llm.executor.pool.tensor


def test_shifted_document_is_reused_and_the_rest_computed(engine):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)
    assert output.reused_tokens == len(DOCUMENT)
    assert output.computed_tokens == len(SHIFTED) - len(DOCUMENT)
    assert outcome(llm, output) == "backend_materialized_reuse"


def test_boundary_at_the_top_equals_cold(engine, cold):
    llm = engine("boundary", boundary=NUM_LAYERS)
    serve(llm, DONOR, PREFILL)
    output, expected = serve(llm, SHIFTED), serve(cold, SHIFTED)
    assert output.reused_tokens == len(DOCUMENT)
    assert token_ids(output) == token_ids(expected)
    assert torch.allclose(first_logits(output), first_logits(expected), atol=1e-4, rtol=0)


def test_reuse_below_the_top_is_an_approximation(engine, cold):
    expected = first_logits(serve(cold, SHIFTED))
    for boundary in (0, NUM_LAYERS - 1):
        llm = engine("boundary" if boundary else "position_fix", boundary=boundary)
        serve(llm, DONOR, PREFILL)
        # A random model's layers all matter: were the donor's KV not used, these would be equal.
        assert (first_logits(serve(llm, SHIFTED)) - expected).abs().max().item() > 1e-2


def test_stock_engine_copies_nothing_it_cannot_use(engine, cold):
    llm = engine(module="semblend_trt.connector")
    serve(llm, DONOR, PREFILL)
    pool = pool_of(llm).clone()
    output = serve(llm, SHIFTED)
    assert output.reused_tokens == 0
    assert token_ids(output) == token_ids(serve(cold, SHIFTED))
    assert outcome(llm, output) == "backend_declined_reuse"
    assert not torch.equal(pool, pool_of(llm))  # it was computed


def test_evicted_exact_prefix_comes_back_from_the_donor(engine, cold):
    llm = engine("exact", module="semblend_trt.connector", max_tokens=512)
    serve(llm, DONOR, PREFILL)
    for seed in range(20, 24):
        serve(llm, text(seed, 400), PREFILL)  # pushes the donor's blocks out of the reuse tree
    prompt = DONOR + QUESTION
    output, expected = serve(llm, prompt), serve(cold, prompt)
    assert output.cached_tokens == 0
    assert output.reused_tokens == len(DONOR)
    assert torch.allclose(first_logits(output), first_logits(expected), atol=1e-4, rtol=0)
    # It is exact, so it may be published: the engine's own cache serves the next one.
    assert serve(llm, prompt).cached_tokens >= len(DONOR) // BLOCK * BLOCK


@pytest.mark.known_defect(8)
def test_approximate_blocks_are_never_published(engine):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    first = serve(llm, SHIFTED)
    again = serve(llm, SHIFTED)
    assert again.cached_tokens <= len(OTHER_INSTRUCTION)
    assert again.reused_tokens == len(DOCUMENT)
    assert token_ids(again) == token_ids(first)


def test_approximate_requests_donate_their_exact_part_only(engine):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)
    # The instruction before the document is exact; document, question and answer are not.
    follow_up = text(77, 30) + SHIFTED[len(OTHER_INSTRUCTION) + len(DOCUMENT) - 10 :] + token_ids(output) * 20
    assert serve(llm, follow_up).reused_tokens == 0


@pytest.mark.known_defect(4)
def test_blocks_leases_and_requests_all_return(engine):
    llm = engine()
    start = llm.block_manager.num_free_blocks
    for prompt in (DONOR, SHIFTED, text(5, 90) + DOCUMENT):
        serve(llm, prompt)
    scheduler = llm.connector_scheduler
    assert llm.block_manager.num_free_blocks == start
    assert scheduler.donor_index.catalog.stats().leases == 0
    assert len(scheduler._requests) == 0
    assert len(llm.connector_worker._followed) == 0
    assert len(scheduler._runtime.active_plans) == 0


@pytest.mark.known_defect(10)
def test_fully_covered_prompt_leaves_one_token(engine):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    output = serve(llm, DOCUMENT)
    assert output.reused_tokens == len(DOCUMENT) - 1
    assert output.computed_tokens == 1


def test_exact_prefix_blocks_are_bitwise_unchanged(engine):
    llm = engine()
    head = text(30, 4 * BLOCK)
    serve(llm, DONOR, PREFILL)
    serve(llm, head + text(31, 50), PREFILL)
    pool = pool_of(llm).clone()
    output = serve(llm, head + text(32, 21) + DOCUMENT + QUESTION)
    changed = (pool != pool_of(llm)).flatten(1).any(1).nonzero().flatten().tolist()
    assert output.cached_tokens == 4 * BLOCK
    assert output.reused_tokens == len(DOCUMENT)
    fresh_blocks = -(-(21 + len(DOCUMENT) + len(QUESTION) + GREEDY.max_tokens) // BLOCK) + 1
    assert len(changed) <= fresh_blocks


def test_exact_repeat_is_left_to_the_engine(engine, cold):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    output = serve(llm, DONOR)
    assert output.reused_tokens == 0
    assert output.cached_tokens >= (len(DONOR) - 1) // BLOCK * BLOCK
    assert outcome(llm, output) == "exact_prefix_route"
    assert token_ids(output) == token_ids(serve(cold, DONOR))


def test_unrelated_prompt_fires_nothing(engine, cold):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    prompt = text(99, 300)
    output = serve(llm, prompt)
    assert output.reused_tokens == 0
    assert outcome(llm, output) == "cold_fallback"
    assert token_ids(output) == token_ids(serve(cold, prompt))


@pytest.mark.known_defect(21)
@pytest.mark.parametrize(("donor_salt", "target_salt"), [("a", "b"), ("a", None), (None, "a")])
def test_salts_isolate(engine, donor_salt, target_salt):
    llm = engine()
    serve(llm, DONOR, PREFILL, cache_salt=donor_salt)
    assert serve(llm, SHIFTED, cache_salt=target_salt).reused_tokens == 0
    assert serve(llm, SHIFTED, cache_salt=donor_salt).reused_tokens == len(DOCUMENT)


@pytest.mark.known_defect(22)
def test_adapters_isolate(engine):
    llm = engine(lora_config={"legal": 1})
    serve(llm, DONOR, PREFILL)
    assert serve(llm, SHIFTED, lora_request="legal").reused_tokens == 0
    assert serve(llm, SHIFTED).reused_tokens == len(DOCUMENT)


@pytest.mark.known_defect(11)
def test_batch_equals_single_runs(engine):
    prompts = [
        SHIFTED,
        text(50, 120),
        text(51, 37) + SECOND_DOCUMENT + QUESTION,
        DONOR[:100],
        text(52, 5) + SECOND_DOCUMENT + text(53, 8) + DOCUMENT + QUESTION,
    ]
    donors = [DONOR, text(54, 11) + SECOND_DOCUMENT]
    single, together = engine(), engine()
    for llm in (single, together):
        for donor in donors:
            serve(llm, donor, PREFILL)
    expected = [serve(single, prompt) for prompt in prompts]
    outputs = together.generate(prompts, GREEDY)
    assert [token_ids(output) for output in outputs] == [token_ids(output) for output in expected]
    assert outputs[4].reused_tokens == len(DOCUMENT) + len(SECOND_DOCUMENT)
    for output, alone in zip(outputs, expected, strict=True):
        assert torch.allclose(first_logits(output), first_logits(alone), atol=1e-4, rtol=0)


@pytest.mark.known_defect(28)
def test_spans_of_two_donors_with_holes_between(engine):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    serve(llm, text(60, 17) + SECOND_DOCUMENT, PREFILL)
    prompt = text(61, 30) + SECOND_DOCUMENT + text(62, 25) + DOCUMENT + QUESTION
    output = serve(llm, prompt)
    assert output.reused_tokens == len(DOCUMENT) + len(SECOND_DOCUMENT)
    assert output.computed_tokens == 30 + 25 + len(QUESTION)


@pytest.mark.known_defect(13)
@pytest.mark.parametrize(("boundary", "chunk"), [(0, 64), (2, 280)])
def test_chunked_suffix_equals_unchunked(engine, boundary, chunk):
    policy = "boundary" if boundary else "position_fix"
    # Behind a boundary the lowest layers run on the document as well, all of it at once.
    prompt = OTHER_INSTRUCTION + DOCUMENT + text(70, 100)
    outputs = []
    for budget in (4096, chunk):
        llm = engine(policy, boundary=boundary, max_num_tokens=budget, max_batch_size=4)
        serve(llm, DONOR, PREFILL)
        outputs.append(serve(llm, prompt))
    assert outputs[1].reused_tokens == len(DOCUMENT)
    assert torch.allclose(first_logits(outputs[0]), first_logits(outputs[1]), atol=1e-4, rtol=0)
    assert token_ids(outputs[0]) == token_ids(outputs[1])


@pytest.mark.known_defect(14)
def test_every_layer_of_a_reused_span_is_written(engine):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    pool_of(llm).fill_(float("nan"))
    output = serve(llm, SHIFTED)
    assert output.reused_tokens == len(DOCUMENT)
    assert torch.isfinite(first_logits(output)).all()


@pytest.mark.known_defect(3)
def test_lost_donor_costs_a_cold_prefill(engine, cold):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    llm.connector_worker.store.clear()
    output, expected = serve(llm, SHIFTED), serve(cold, SHIFTED)
    assert token_ids(output) == token_ids(expected)
    assert torch.allclose(first_logits(output), first_logits(expected), atol=1e-4, rtol=0)
    report = llm.connector_scheduler.reuse_of(output.request_id)
    assert (report.outcome, report.reason, report.reused_tokens) == ("backend_declined_reuse", "load_failed", 0)
    # Nobody counts on the lost donor again.
    assert outcome(llm, serve(llm, text(8, 50) + DOCUMENT + QUESTION)) == "cold_fallback"


def test_impossible_boundary_is_a_standing_refusal(engine, cold):
    llm = engine("boundary", boundary=NUM_LAYERS + 1)
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_reason) == (0, "configuration")
    assert token_ids(output) == token_ids(serve(cold, SHIFTED))


def test_byte_budget_holds_and_evicts(engine, monkeypatch):
    one_donor = len(DONOR) * NUM_LAYERS * 2 * 2 * 16 * 4
    monkeypatch.setenv("SEMBLEND_HOST_BYTES", str(int(one_donor * 2.2)))
    llm = engine()
    for seed in range(5):
        serve(llm, text(100 + seed, len(DONOR) - 1), PREFILL)
        assert llm.connector_worker.store.host.used_bytes <= one_donor * 2.2
    serve(llm, DONOR, PREFILL)
    assert serve(llm, SHIFTED).reused_tokens == len(DOCUMENT)
    assert serve(llm, text(1, 9) + text(100, len(DONOR) - 1)).reused_tokens == 0


def test_aborted_request_leaves_nothing_behind(engine):
    llm = engine()
    serve(llm, DONOR, PREFILL)
    start = llm.block_manager.num_free_blocks
    stream = llm.generate_async(SHIFTED, SamplingParams(max_tokens=50, ignore_eos=True))
    output = next(stream)
    llm.abort(output.request_id)
    llm.settle()
    assert llm.block_manager.num_free_blocks == start
    assert llm.connector_scheduler.donor_index.catalog.stats().leases == 0
    assert len(llm.connector_worker._followed) == 0


def test_policy_off_keeps_and_finds_nothing(engine):
    llm = engine("off")
    serve(llm, DONOR, PREFILL)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.reuse_reason) == (0, "policy_off")
    assert llm.connector_scheduler.donor_index is None  # nothing was even reserved


def test_every_request_ends_in_exactly_one_outcome(engine):
    llm = engine()
    prompts = [DONOR, SHIFTED, DONOR, text(90, 30), text(91, 300), text(92, 300) + DOCUMENT]
    outcomes = [outcome(llm, serve(llm, prompt)) for prompt in prompts]
    stream = llm.generate_async(SHIFTED, SamplingParams(max_tokens=50, ignore_eos=True))
    llm.abort(next(stream).request_id)
    llm.settle()
    counts = {kind.value: count for kind, count in llm.connector_scheduler.outcomes.counts().items() if count}
    assert counts == {
        "backend_materialized_reuse": 2,
        "exact_prefix_route": 1,
        "cold_fallback": 3,
        "backend_declined_reuse": 1,
    }
    assert outcomes[-1] == "backend_declined_reuse"
    assert llm.connector_scheduler.outcomes.reasons()["low_reuse"] == 1


def test_audit_log_tells_the_story(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("SEMBLEND_AUDIT_PATH", str(tmp_path / "audit.jsonl"))
    llm = engine()
    serve(llm, DONOR, PREFILL)
    serve(llm, SHIFTED)
    llm.shutdown()
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    for name in ("scheduler_initialized", "lookup", "donor_registered", "target_allocated", "plan_dispatched"):
        assert name in names
    materialized = next(event for event in events if event["event"] == "materialized")
    assert materialized["materialized"] == len(DOCUMENT) * NUM_LAYERS
    assert materialized["requires_rope_correction"] is True


def test_scheduler_never_raises_into_the_engine(engine, monkeypatch):
    llm = engine()
    serve(llm, DONOR, PREFILL)

    def broken(*_arguments, **_options):
        raise RuntimeError("injected")

    monkeypatch.setattr(llm.connector_scheduler.donor_index, "plan", broken)
    output = serve(llm, SHIFTED)
    assert output.reused_tokens == 0
    assert llm.connector_scheduler.outcomes.reasons()["internal_error"] == 1


@pytest.mark.parametrize("step", ["intend", "begin_save"])
def test_an_error_of_the_library_leaks_no_lease(engine, monkeypatch, step):
    llm = engine()
    serve(llm, DONOR, PREFILL)

    def broken(*_arguments, **_options):
        raise RuntimeError("injected")

    monkeypatch.setattr(llm.connector_scheduler.donor_index, step, broken)
    serve(llm, SHIFTED)
    assert llm.connector_scheduler.donor_index.catalog.stats().leases == 0
