"""Metadata of another version never raises in the middle of the worker's work, and never loses a promise without an
error."""

import pickle
from dataclasses import fields, replace

import pytest

from semblend_trt.connector.metadata import RequestProgress, SemBlendConnectorMetadata, readable_metadata
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import OffloadCommands, SaveIntent
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.plan import PlanSpan, SpanCheck
from semblend_trt.runtime import Runtime
from tests.semblend_trt.plans import plan_of

PLAN = plan_of(
    PlanSpan("donor-1", 0, 4, 16), request_id=7, computed=4, blocks=(1, 2, 3), check=SpanCheck(1, threshold=0.1)
)
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


def forged(value, *path):
    """The metadata with `value` at the end of a path of fields and indices, as bytes that no constructor has seen."""
    sent = pickle.loads(pickle.dumps(WHOLE))
    *steps, last = path
    owner = sent
    for step in steps:
        owner = owner[step] if isinstance(step, int) else getattr(owner, step)
    object.__setattr__(owner, last, value)
    return pickle.loads(pickle.dumps(sent))


NO_COUNTS = (-1, 1.5, "7", None, [1])
SPAN, RULE = ("plans", 0, "spans", 0), ("plans", 0, "execution", "check")
COUNTS = [
    *((*SPAN, name) for name in ("donor_start", "target_start", "length", "generation")),
    *(("plans", 0, name) for name in ("num_computed_tokens", "matched_tokens", "block_size")),
    *(("plans", 0, "execution", name) for name in ("num_layers", "recompute_boundary_layer", "head_tokens")),
    *((*RULE, name) for name in ("layer", "window_tokens", "sample_every")),
    *(("commands", "saves", 0, name) for name in ("max_tokens", "generation")),
]


@pytest.mark.parametrize("path", COUNTS, ids=lambda path: path[-1])
@pytest.mark.parametrize("value", NO_COUNTS)
def test_a_forged_number_is_refused(path, value):
    assert_refused(forged(value, *path))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (1 << 20, (*SPAN, "target_start")),  # behind the prompt, and behind its blocks
        (1 << 20, (*SPAN, "length")),
        (0, (*SPAN, "length")),
        (0, ("plans", 0, "block_size")),
        (99, (*RULE, "layer")),
        ((1, 1, 2), ("plans", 0, "target_block_ids")),
        ((1, -2, 3), ("plans", 0, "target_block_ids")),
        ((1,), ("plans", 0, "target_block_ids")),
        (None, ("plans", 0, "prompt_token_ids")),
        (None, ("plans", 0, "execution")),
        (7, ("plans", 0, "spans")),
        ("nowhere", ("commands", "saves", 0, "tier")),
        (7, ("commands", "saves", 0, "donor_id")),
        (("x",), ("forgotten",)),
        ((None,), ("grown",)),
        ((RequestProgress(7, ("x",), 20, True),), ("progress",)),
        ((RequestProgress(7, (1,), -20, True),), ("progress",)),
        ((RequestProgress("7", (1,), 20, True),), ("progress",)),
        (OffloadCommands(fetches=[3]), ("commands",)),
        (None, ("commands",)),
    ],
)
def test_a_forged_value_is_refused(value, path):
    assert_refused(forged(value, *path))


def assert_refused(told):
    runtime = Runtime()
    with pytest.raises(DonorUnavailableError):
        readable_metadata(told, runtime)
    assert (runtime.faults, runtime.refusal) == ({"metadata": 1}, "metadata_version")


def test_what_an_engine_may_send_is_no_forgery():
    # Blocks outside of a window, and numbers of dummy requests.
    progress = (RequestProgress(-3, (4, -1), 20, True), RequestProgress((1 << 64) - 1, (), 20, False))
    assert readable_metadata(forged(progress, "progress"), Runtime()) is not None
