"""Plans before SGLang's own forward: with everything computed, answers are those of cold runs."""

import pytest

from tests.builders.vllm import DONOR, MOVED, NEW, assert_cold
from tests.engine_wrapper.sglang.conftest import OTHER, WHOLE


@pytest.mark.promise(
    "engines",
    "In SGLang answers are those of cold runs with all layers computed again, and KV that moved never enters its "
    "prefix cache",
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"disable_overlap_schedule": True}, id="plain"),
        pytest.param({}, id="overlap"),
        pytest.param({"page_size": 16}, id="pages"),
        pytest.param({"chunked_prefill_size": 64}, id="chunks"),
    ],
)
def test_answers_are_those_of_cold_runs(serve, cold, options, record_property):
    with serve(WHOLE, **options) as served:
        served.teach()
        moved, other, _ = assert_cold(served, cold, MOVED, OTHER, NEW)
        assert moved.cached >= 480
        pairs = zip(moved.logprobs, cold(MOVED).logprobs, strict=True)
        record_property("logprob_difference", max(abs(ours - theirs) for ours, theirs in pairs))
        assert moved.receipt["offered_tokens"] >= 480
        assert other.receipt["outcome"] == "backend_materialized_reuse"
        # What is exact alone is in SGLang's own prefix cache.
        assert assert_cold(served, cold, DONOR)[0].receipt["exact_prefix_tokens"] >= len(DONOR) - 16


def test_checked_plans_keep_what_does_not_deviate(serve, profile_at):
    with serve(profile_at({"layer": 2, "threshold": 1.0})) as served:
        served.teach()
        answer = served.ask(MOVED, max_tokens=16)
        assert answer.receipt["checked_tokens"] >= 480
        assert answer.receipt["reused_tokens"] == answer.receipt["checked_tokens"]
