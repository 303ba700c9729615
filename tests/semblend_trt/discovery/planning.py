"""Planners over donors of random text, requests, and profiles for tests."""

from dataclasses import replace

from kernels.layout import KvGeometry
from semblend_trt.config import Settings
from semblend_trt.discovery.planner import LookupRequest, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.plan import EngineMode
from semblend_trt.policy import ReusePolicy
from semblend_trt.reuse_profile import ReuseProfile
from tests.semblend_trt.samples import NAMESPACE

NUM_LAYERS = 6
STOCK, WRAPPER = EngineMode.STOCK, EngineMode.WRAPPER


def index_of(donors, bounds=None):
    index = SpanIndex(bounds)
    for donor_id, tokens in donors.items():
        index.add("space", donor_id, tokens)
    return index


def planner(donors, policy="position_fix", generations=None, chunk=None, bounds=None, asks=None, **overrides):
    """`asks`: the functions that the planner calls, by name."""
    index = index_of(donors, bounds)
    # Tests share their processors; only those of the deadline itself may meet it.
    values = Settings(policy=ReusePolicy(policy), **({"lookup_deadline_ms": 10_000} | overrides))
    return Planner(index, values, values.policy, NUM_LAYERS, generations=generations, chunk=chunk, **asks or {})


def request(tokens, computed=0, mode=WRAPPER, guard=True, profile=None, profile_refusal="no_profile"):
    return LookupRequest(
        7, "space", tokens, computed, 32, mode, guard, profile=profile, profile_refusal=profile_refusal
    )


def profile(policy, **fields):
    """A profile that holds for the engine; the planner reads its terms only."""
    namespace = replace(NAMESPACE, extra={"compute_dtype": "bfloat16", "configuration": "c"})
    return ReuseProfile.made_for(namespace, KvGeometry(NUM_LAYERS, 2, 16, 32), policy=policy, **fields)


def plan_of(planned):
    assert planned.outcome_reason is None
    assert planned.plan is not None
    return planned.plan
