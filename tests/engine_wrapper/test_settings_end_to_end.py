"""Switches and bounds that users know by name do what documentation says, seen from outside a served engine."""

from collections import deque

import pytest

from semblend_trt.cost import CostModel
from tests.builders.engine import DOCUMENT, DONOR, SHIFTED, assert_same, serve, teach

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
