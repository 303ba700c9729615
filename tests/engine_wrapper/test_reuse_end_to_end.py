"""The whole path on a tiny model: donors are kept, found at another position, moved, and the rest is computed."""

import pytest
import torch

from engine_wrapper.embedded.llm import SamplingParams
from tests.builders import engine as serving
from tests.builders.engine import DOCUMENT, DONOR, QUESTION, SHIFTED, assert_same, serve, teach, text, token_ids
from tests.engine_wrapper.watching import failing

SECOND_DOCUMENT = text(11, 150)

pytestmark = pytest.mark.usefixtures("position_fix")


@pytest.fixture
def taught(engine):
    """An engine that has served DONOR."""
    llm = engine()
    teach(llm, DONOR)
    return llm


@pytest.mark.promise("reuse", "Approximate KV does not enter the exact prefix cache")
@pytest.mark.known_defect(8)
def test_approximate_blocks_are_never_published(taught):
    first, again = serve(taught, SHIFTED), serve(taught, SHIFTED)
    assert again.cached_tokens <= len(serving.OTHER_INSTRUCTION)
    assert (again.reused_tokens, token_ids(again)) == (len(DOCUMENT), token_ids(first))


@pytest.mark.promise("reuse", "KV that a cold run would...")
def test_approximate_requests_donate_their_exact_part_only(taught):
    output = serve(taught, SHIFTED)
    follow_up = text(77, 30) + SHIFTED[len(serving.OTHER_INSTRUCTION) + len(DOCUMENT) - 10 :] + token_ids(output) * 20
    assert serve(taught, follow_up).reused_tokens == 0


@pytest.mark.promise("reuse", "Blocks, leases and requests all return, also from aborted requests")
@pytest.mark.known_defect(4)
def test_blocks_leases_and_requests_all_return(engine):
    llm = engine()
    start = llm.block_manager.num_free_blocks
    for prompt in (DONOR, SHIFTED, text(5, 90) + DOCUMENT):
        serve(llm, prompt)
    scheduler = llm.connector_scheduler
    assert llm.block_manager.num_free_blocks == start
    assert scheduler.donor_index.catalog.stats().leases == len(scheduler._requests) == 0
    assert len(llm.connector_worker._followed) == len(scheduler._runtime.active_plans) == 0


@pytest.mark.promise("reuse", "At least one prompt token is...")
@pytest.mark.known_defect(10)
def test_fully_covered_prompt_leaves_one_token(taught):
    output = serve(taught, DOCUMENT)
    assert (output.reused_tokens, output.computed_tokens) == (len(DOCUMENT) - 1, 1)


@pytest.mark.promise(
    "reuse", "Requests with different salts, or one with and one without, never see each other's donors"
)
@pytest.mark.known_defect(21)
@pytest.mark.parametrize(("donor_salt", "target_salt"), [("a", "b"), ("a", None), (None, "a")])
def test_salts_isolate(engine, donor_salt, target_salt):
    llm = engine()
    serve(llm, DONOR, cache_salt=donor_salt)
    assert serve(llm, SHIFTED, cache_salt=target_salt).reused_tokens == 0
    assert serve(llm, SHIFTED, cache_salt=donor_salt).reused_tokens == len(DOCUMENT)


@pytest.mark.promise("reuse", "Requests with different adapters never meet")
@pytest.mark.known_defect(22)
def test_adapters_isolate(engine):
    llm = engine(lora_config={"legal": 1})
    teach(llm, DONOR)
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
    single, together = engine(), engine()
    for llm in (single, together):
        teach(llm, DONOR, text(54, 11) + SECOND_DOCUMENT)
    expected = [serve(single, prompt) for prompt in prompts]
    outputs = together.generate(prompts, serving.GREEDY)
    assert outputs[4].reused_tokens == len(DOCUMENT) + len(SECOND_DOCUMENT)
    for output, alone in zip(outputs, expected, strict=True):
        assert_same(output, alone)


@pytest.mark.promise(
    "reuse", "An engine with the wrapper reuses any run of equal tokens, and computes what lies between"
)
@pytest.mark.known_defect(28)
def test_spans_of_two_donors_with_holes_between(taught):
    teach(taught, text(60, 17) + SECOND_DOCUMENT)
    output = serve(taught, text(61, 30) + SECOND_DOCUMENT + text(62, 25) + DOCUMENT + QUESTION)
    assert output.reused_tokens == len(DOCUMENT) + len(SECOND_DOCUMENT)
    assert output.computed_tokens == 30 + 25 + len(QUESTION)


@pytest.mark.known_defect(14)
def test_every_layer_of_a_reused_span_is_written(taught):
    taught.executor.pool.fill_(float("nan"))
    output = serve(taught, SHIFTED)
    assert output.reused_tokens == len(DOCUMENT)
    assert torch.isfinite(serving.logits_of(output)).all()


@pytest.mark.promise("reuse", "A donor that is lost costs a cold prefill, never a wrong token")
@pytest.mark.known_defect(3)
def test_lost_donor_costs_a_cold_prefill(engine, taught):
    taught.connector_worker.store.clear()
    output = serve(taught, SHIFTED)
    assert_same(output, serve(engine.cold(), SHIFTED))
    report = taught.connector_scheduler.reuse_of(output.request_id)
    assert (report.outcome, report.reason, report.reused_tokens) == ("backend_declined_reuse", "load_failed", 0)
    assert serve(taught, text(8, 50) + DOCUMENT + QUESTION).reuse_outcome == "cold_fallback"


@pytest.mark.promise("reuse", "Every request ends in one outcome, with its tokens and the largest deviation kept")
@pytest.mark.promise("reuse", "Unrelated prompts are served from no donor; a miss costs a look-up and nothing else")
def test_every_request_ends_in_exactly_one_outcome(engine):
    llm = engine()
    outcomes = []
    for prompt in (DONOR, SHIFTED, DONOR, text(90, 30), text(91, 300), text(92, 300) + DOCUMENT):
        output = serve(llm, prompt)
        assert output.reuse_outcome == llm.connector_scheduler.reuse_of(output.request_id).outcome
        outcomes.append(output.reuse_outcome)
    assert output.reuse_reason == "low_reuse"
    aborted = next(llm.generate_async(SHIFTED, SamplingParams(max_tokens=50, ignore_eos=True))).request_id
    llm.abort(aborted)
    llm.settle()
    outcomes.append(llm.connector_scheduler.reuse_of(aborted).outcome)
    cold, reused = "cold_fallback", "backend_materialized_reuse"
    assert outcomes == [cold, reused, "exact_prefix_route", cold, cold, "backend_declined_reuse", reused]


@pytest.mark.promise("reuse", "No error of ours reaches the engine")
@pytest.mark.parametrize("step", ["plan", "intend", "begin_save"])
def test_an_error_of_the_scheduler_reaches_no_engine_and_leaks_no_lease(taught, monkeypatch, step):
    lookup = taught.connector_scheduler._lookup
    failing(monkeypatch, lookup.donors if step == "begin_save" else lookup.planner, step, RuntimeError, once=False)
    output = serve(taught, SHIFTED)
    assert taught.connector_scheduler.donor_index.catalog.stats().leases == 0
    if step == "plan":
        assert output.reused_tokens == 0
        assert output.reuse_reason == "internal_error"
