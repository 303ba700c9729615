"""Switches and bounds that users know by name do what documentation says, seen from outside a served engine."""

from collections import deque

import pytest
from prometheus_client import REGISTRY

from semblend_trt.cost import CostModel
from tests.builders import engine as serving
from tests.builders.engine import DOCUMENT, DONOR, QUESTION, SHIFTED, assert_same, serve, teach, text, token_ids

pytestmark = pytest.mark.usefixtures("position_fix")


@pytest.mark.promise("policies", "`SEMBLEND_POLICY=off` and `SEMBLEND_ENABLED=0` keep and find...")
def test_without_enabled_everything_is_cold_and_nothing_is_kept(engine, shifted):
    llm, output = shifted(ENABLED=0)
    assert (output.reused_tokens, output.reuse_outcome, output.reuse_reason) == (0, "cold_fallback", "disabled")
    assert llm.connector_scheduler.donor_index is None
    assert_same(output, serve(engine.cold(), SHIFTED))


def test_discovery_only_reports_donors_and_places_nothing(engine, shifted):
    llm, output = shifted(DISCOVERY_ONLY=1)
    assert (output.reused_tokens, output.reuse_outcome) == (0, "semantic_discovery_only")
    assert output.computed_tokens == len(SHIFTED)
    assert llm.connector_scheduler.donor_index.catalog.stats().leases == 0
    assert engine.events("lookup")[-1]["diagnostics"]["tokens_reused"] == len(DOCUMENT)
    assert_same(output, serve(engine.cold(), SHIFTED))


def test_a_strict_prefix_boundary_promises_whole_blocks_without_a_hole(engine, shifted):
    llm, output = shifted(STRICT_PREFIX_BOUNDARY=1)
    assert (output.reused_tokens, output.reuse_reason) == (0, "strict_prefix_boundary")
    from_start = serve(llm, DOCUMENT + text(5, 20))
    assert from_start.reused_tokens == len(DOCUMENT) // serving.BLOCK * serving.BLOCK
    assert from_start.computed_tokens == len(DOCUMENT) + 20 - from_start.reused_tokens
    assert_same(output, serve(engine.cold(), SHIFTED))


def test_exact_materialization_only_places_what_a_cold_run_would_compute(engine, shifted):
    llm, output = shifted(EXACT_MATERIALIZATION_ONLY=1, cache={"max_tokens": 512})
    assert (output.reused_tokens, output.reuse_outcome) == (0, "semantic_discovery_only")
    teach(llm, *(text(seed, 400) for seed in range(20, 24)))  # push the donor's blocks out of the engine's own cache
    prompt = DONOR + QUESTION
    exact = serve(llm, prompt)
    assert (exact.cached_tokens, exact.reused_tokens) == (0, len(DONOR))
    reported = [event["diagnostics"] for event in engine.events("lookup") if event["kind"] == "discovery_only"]
    assert [each["tokens_reused"] for each in reported] == [len(DOCUMENT)]
    cold = engine.cold()
    assert_same(output, serve(cold, SHIFTED))
    assert_same(exact, serve(cold, prompt))


def test_an_audit_log_that_cannot_be_written_is_counted_until_the_engine_ends(engine, tmp_path):
    def lost():
        return REGISTRY.get_sample_value("semblend_audit_dropped_total", {"reason": "not_written"}) or 0

    (tmp_path / "file").write_text("")
    before = lost()
    llm = engine(AUDIT_PATH=tmp_path / "file" / "audit.jsonl")
    assert len(token_ids(serve(llm, SHIFTED))) == serving.GREEDY.max_tokens
    llm.shutdown()
    assert lost() - before >= 3  # started, lookup, settled


@pytest.mark.promise("donors", "Requests with fewer than `SEMBLEND_MIN_DONOR_TOKENS` tokens...")
@pytest.mark.known_defect(20)
def test_max_donors_forgets_the_least_recently_used(engine):
    llm = engine(MAX_DONORS=2)
    documents = [text(100 + number, 200) for number in range(3)]
    for document in documents:
        teach(llm, document)
        assert llm.connector_scheduler.donor_index.catalog.stats().ready <= 2
    # The exact part of these, their head, is too short to become a donor and push another out.
    reused = [serve(llm, serving.INSTRUCTION + document).reused_tokens for document in reversed(documents)]
    assert reused == [len(DOCUMENT) - 1, len(DOCUMENT) - 1, 0]


def sizes(owner):
    """The lengths of the collections in an object, by name."""
    fields = vars(owner) if hasattr(owner, "__dict__") else {name: getattr(owner, name) for name in owner.__slots__}
    return {name: len(value) for name, value in fields.items() if isinstance(value, (dict, list, set, deque))}


@pytest.mark.promise(
    "donors",
    "Of many salts no more is kept than of their donors, which `SEMBLEND_HOST_BYTES` and `SEMBLEND_MAX_DONORS` bound",
)
def test_of_many_salts_no_more_is_kept_than_donors_are(engine):
    llm = engine(MAX_DONORS=4)
    scheduler, kept = llm.connector_scheduler, []
    for number in range(24):
        serve(llm, DOCUMENT, cache_salt=f"tenant-{number}")
        index = scheduler.donor_index
        owners = scheduler, scheduler._profiles, index, index.catalog, index.texts, index.texts.spans, index.offload
        kept.append([sizes(each) for each in owners])
    donors = index.texts.spans._donors.values()
    assert len(donors) == len({donor.namespace_key for donor in donors}) == 4
    assert kept[-1] == kept[5]


@pytest.mark.parametrize(
    ("settings", "reused", "reason"),
    [
        ({"MIN_REUSE_RATIO": 0.68}, 200, None),
        ({"MIN_REUSE_RATIO": 0.69}, 0, "low_reuse"),
        ({"MIN_SPAN": 200}, 200, None),
        ({"MIN_SPAN": 201}, 0, "no_donor_match"),
        ({"POLICY": "boundary", "RECOMPUTE_BOUNDARY_LAYER": 4}, 0, "configuration"),  # of three layers
    ],
)
def test_bounds_of_what_is_worth_reusing(shifted, settings, reused, reason):
    _, output = shifted(**settings)
    assert (output.reused_tokens, output.reuse_reason) == (reused, reason)


@pytest.mark.promise(
    "donors",
    "A look-up over `SEMBLEND_LOOKUP_DEADLINE_MS` of processor time reuses what it has chosen, or is refused, as "
    "`lookup_timeout`; the deadline grows with long prompts",
)
@pytest.mark.known_defect(17)
def test_a_lookup_past_its_deadline_costs_a_cold_prefill(engine, shifted):
    _, output = shifted(LOOKUP_DEADLINE_MS=0.001)
    assert (output.reused_tokens, output.reuse_reason) == (0, "lookup_timeout")
    assert output.reuse_outcome == "backend_declined_reuse"
    assert_same(output, serve(engine.cold(), SHIFTED))


def test_a_lookup_may_take_half_of_what_a_plan_has_to_save(engine):
    llm = engine(LOOKUP_DEADLINE_MS=0.001, MIN_SAVING=0.1)
    llm.connector_scheduler._runtime.costs = CostModel((0, 1, 0), (0, 0, 0, 0), 0)  # a second for a token
    teach(llm, DONOR)
    answer = serve(llm, SHIFTED)
    assert (answer.reused_tokens, answer.reuse_reason) == (len(DOCUMENT), None)
