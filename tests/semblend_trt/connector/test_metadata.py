"""Metadata of another version never raises in the middle of the worker's work, and never loses a promise without an
error."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from semblend_trt.connector.metadata import (
    RequestProgress,
    SaveIntent,
    SemBlendConnectorMetadata,
    readable_metadata,
)
from semblend_trt.donors.donor_table import Tier
from semblend_trt.donors.offload import OffloadCommands
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.plan import PlanSpan
from semblend_trt.runtime import Runtime
from tests.semblend_trt.plans import plan_of

PLAN = plan_of(PlanSpan("donor-1", 0, 4, 16), request_id=7, computed=4, blocks=(1, 2, 3))
WHOLE = SemBlendConnectorMetadata(
    plans=(PLAN,),
    followed=(7,),
    progress=(RequestProgress(7, (1, 2, 3), 20, True),),
    forgotten=(5,),
    commands=OffloadCommands(drops=["a"], promotions=["b"], saves=[SaveIntent(7, "donor", 100, Tier.DEVICE, True)]),
)


def unsigned(metadata):
    """As a version that does not know the last field would pickle it."""
    blank = object.__new__(SemBlendConnectorMetadata)
    for each in fields(metadata)[:-1]:
        object.__setattr__(blank, each.name, getattr(metadata, each.name))
    return blank


def test_metadata_of_this_version_is_taken_as_it_is():
    runtime = Runtime()
    sent = pickle.loads(pickle.dumps(WHOLE))
    assert readable_metadata(sent, runtime) is sent
    assert sent == WHOLE
    assert readable_metadata(SemBlendConnectorMetadata(), runtime) is not None
    assert readable_metadata(None, runtime) is None
    assert (runtime.faults, runtime.refusal) == ({}, None)


@pytest.mark.parametrize("told", [{"followed": ()}, "garbage", replace(WHOLE, plans=(), version="0.0.0")])
def test_metadata_of_another_version_is_counted_and_ends_reuse(told):
    runtime = Runtime()
    assert readable_metadata(told, runtime) is None
    assert readable_metadata(unsigned(replace(WHOLE, plans=())), runtime) is None
    assert (runtime.faults, runtime.refusal) == ({"metadata": 2}, "metadata_version")


@pytest.mark.parametrize("told", [replace(WHOLE, version="0.0.0"), unsigned(WHOLE)])
def test_plans_of_another_version_are_no_plans_to_serve_from(told):
    runtime = Runtime()
    with pytest.raises(DonorUnavailableError, match="plans are of another version"):
        readable_metadata(told, runtime)
    assert (runtime.faults, runtime.refusal) == ({"metadata": 1}, "metadata_version")
