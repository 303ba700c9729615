"""Metadata of another version never raises in the middle of the worker's work, and never loses a promise in silence."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from semblend_trt.connector.bound_metadata import FORM, readable_metadata
from semblend_trt.connector.metadata import RequestProgress, SaveIntent, SemBlendConnectorMetadata
from semblend_trt.connector.tier_orders import TierOrders
from semblend_trt.donors.placement import Tier
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.plan import (
    AttentionMode,
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    PublicationPolicy,
    SemanticKvPlan,
)
from semblend_trt.runtime import Runtime

INTENT = SaveIntent(7, "donor", 100, Tier.DEVICE, True)
PLAN = SemanticKvPlan(
    request_id=7,
    namespace_key="namespace",
    kind=PlanKind.REQUEST_LOCAL_PREFIX,
    publication=PublicationPolicy.REQUEST_LOCAL,
    spans=(PlanSpan("donor-1", 0, 4, 16),),
    prompt_token_ids=tuple(range(30)),
    num_computed_tokens=4,
    matched_tokens=16,
    block_size=8,
    execution=EngineExecution(EngineMode.WRAPPER, AttentionMode.SUFFIX_ONLY, 3, suffix_start=20),
    target_block_ids=(1, 2, 3),
)
WHOLE = SemBlendConnectorMetadata(
    plans=(PLAN,),
    intents=(INTENT,),
    progress=(RequestProgress(7, (1, 2, 3), 20, True),),
    forgotten=(5,),
    orders=TierOrders(drops=("a",), lifts=("b",)),
)


def without(value, name):
    """As a version that does not know the field would pickle it."""
    blank = object.__new__(type(value))
    for each in fields(value):
        if each.name != name:
            object.__setattr__(blank, each.name, getattr(value, each.name))
    return blank


def given(name, value):
    """The metadata with another value in a field; nothing checks it on its way."""
    metadata = without(WHOLE, name)
    object.__setattr__(metadata, name, value)
    return metadata


def test_metadata_of_this_version_is_taken_as_it_is():
    runtime = Runtime()
    sent = pickle.loads(pickle.dumps(WHOLE))
    assert readable_metadata(sent, runtime) is sent
    checked = replace(PLAN, target_block_ids=None)
    assert readable_metadata(SemBlendConnectorMetadata(plans=(checked,)), runtime) is not None
    assert readable_metadata(SemBlendConnectorMetadata(), runtime) is not None
    assert (runtime.faults, runtime.refusal) == ({}, None)


def test_what_this_version_has_signed_is_not_read_again():
    """In every iteration that would take longer than all else that is done with it."""
    runtime, unread = Runtime(), replace(given("forgotten", None), form=FORM)
    assert readable_metadata(unread, runtime) is unread
    foreign = replace(WHOLE, forgotten=None, form="0" * len(FORM))
    assert readable_metadata(foreign, runtime) == replace(foreign, forgotten=())
    assert readable_metadata(without(replace(WHOLE, form=FORM), "form"), runtime) == WHOLE
    assert (runtime.faults, runtime.refusal) == ({"metadata": 2}, "metadata_version")


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        *(("intents", given("intents", (without(INTENT, each.name),))) for each in fields(SaveIntent)),
        *(("orders", given("orders", without(TierOrders(), each.name))) for each in fields(TierOrders)),
        *((name, without(WHOLE, name)) for name in ("intents", "progress", "forgotten", "orders")),
        ("intents", given("intents", [INTENT])),
        ("intents", given("intents", (replace(INTENT, tier="host"),))),
        ("intents", given("intents", (replace(INTENT, max_tokens="100"),))),
        ("progress", given("progress", (RequestProgress(7, (1, "2"), 20, True),))),
        ("progress", given("progress", (RequestProgress([7], (1,), 20, True),))),
        ("progress", given("progress", (RequestProgress(7, (1,), None, True),))),
        ("progress", given("progress", ((7, (1,), 20, True),))),
        ("forgotten", given("forgotten", ([5],))),
        ("orders", given("orders", TierOrders(drops=(1,)))),
        ("orders", given("orders", ("a",))),
    ],
)
def test_a_field_of_another_form_is_left_out_and_counted(name, metadata):
    runtime = Runtime()
    read = readable_metadata(metadata, runtime)
    assert read == replace(WHOLE, **{name: getattr(SemBlendConnectorMetadata(), name)})
    assert (runtime.faults, runtime.refusal) == ({"metadata": 1}, "metadata_version")


@pytest.mark.parametrize(
    "plans",
    [
        *((without(PLAN, each.name),) for each in fields(SemanticKvPlan)),
        ({"request_id": 7},),
        (None,),
        [PLAN],
    ],
)
def test_plans_of_another_form_are_no_plans_to_serve_from(plans):
    runtime = Runtime()
    with pytest.raises(DonorUnavailableError, match="this iteration's plans cannot be read"):
        readable_metadata(given("plans", plans), runtime)
    assert (runtime.faults, runtime.refusal) == ({"metadata": 1}, "metadata_version")


@pytest.mark.parametrize("part", ["spans", "execution"])
def test_parts_of_plans_are_read_as_well(part):
    plan = without(PLAN, part)
    inner = (without(PLAN.spans[0], "exact"),) if part == "spans" else without(PLAN.execution, "head_tokens")
    object.__setattr__(plan, part, inner)
    with pytest.raises(DonorUnavailableError):
        readable_metadata(given("plans", (plan,)), Runtime())
