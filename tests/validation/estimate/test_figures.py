"""What is estimated is what an engine then does; sums over prompts, documents that recur, and the latency model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import PlanSpan
from semblend_trt.pool_facts import PoolFacts
from semblend_trt.reuse_profile import ProfileCheck
from tests.builders.engine import PREFILL, Engines, drain
from tests.semblend_trt.discovery.planning import profile
from tests.semblend_trt.samples import text
from validation.estimate.figures import LatencyModel, Observation, Serving, recorded_observations
from validation.models import load

VOCABULARY = 256


def span(start, length, *, exact=False):
    return PlanSpan("1", start if exact else start + 5, start, length, exact=exact)


def traffic(seed, count=24):
    """Prompts of a system prompt, some of six documents in any order, and a question; some prompts come again."""
    random = np.random.default_rng(seed)
    system = random.integers(0, VOCABULARY, 40)
    documents = [random.integers(0, VOCABULARY, int(random.integers(70, 160))) for _ in range(6)]
    prompts = []
    for _ in range(count):
        if prompts and random.random() < 0.15:
            prompts.append(prompts[int(random.integers(len(prompts)))])
            continue
        chosen = random.choice(6, int(random.integers(1, 4)), replace=False)
        parts = [system, *(documents[each] for each in chosen), random.integers(0, VOCABULARY, 30)]
        prompts.append(np.concatenate(parts).astype(np.int32))
    return prompts


@pytest.mark.promise(
    "commands", "`semblend-trt estimate` says of a log what the embedded engine then reuses of it, prompt by prompt"
)
@pytest.mark.parametrize(
    ("pool_tokens", "host_tokens"), [(8_192, 8_192), (1_024, 1_200)], ids=["room for all", "little room"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_engine_reuses_what_was_estimated(seed, pool_tokens, host_tokens, tiny_qwen2_path, tmp_path):
    runner = load(str(tiny_qwen2_path), "cpu", "float32")
    facts = runner.facts
    geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, 32)
    host_bytes = host_tokens * geometry.bytes_per_token(runner.dtype)
    settings = load_settings(policy="position_fix", host_bytes=host_bytes, lookup_deadline_ms=60_000)
    serving = Serving(settings, PoolFacts(geometry, pool_tokens // 32, runner.dtype))
    engines = Engines(tmp_path / "audit.jsonl", model=tiny_qwen2_path, runner=runner, max_seq_len=1_024)
    cache = {"tokens_per_block": 32, "max_tokens": pool_tokens}
    found, estimated = [], []
    with engines(cache=cache, POLICY="position_fix", HOST_BYTES=host_bytes) as llm:
        for prompt in traffic(seed):
            output = llm.generate([prompt.tolist()], PREFILL)[0]
            drain(llm)
            report = llm.connector_scheduler.reuse_of(output.request_id)
            found.append((report.exact_prefix_tokens, report.offered_tokens, report.reason))
            served = serving.serve("", prompt)
            estimated.append((served.prefix, sum(span.length for span in served.spans), served.reason))
    assert estimated == found
    assert sum(offered for _, offered, _ in found) > 0
    assert (serving.donors.catalog.stats().evicted > 0) is (host_tokens == 1_200)


TINY_POOL = PoolFacts(KvGeometry(4, 1, 16, 32, kv_factor=1), 256, torch.int8)


def moved_tokens(serving, *parts):
    return sum(span.length for span in serving.serve("", np.concatenate(parts)).spans if not span.exact)


def test_with_a_profile_what_stands_behind_moved_text_is_reused_up_to_its_generation():
    """A prompt leaves the text behind its moved one as a donor only where a profile allows that."""
    found = []
    for generations in (0, 1):
        check = ProfileCheck(layer=1, threshold=0.1)
        settings = load_settings(policy="verified", min_reuse_ratio=0.2)
        serving = Serving(settings, TINY_POOL, profile("verified", check=check, generations=generations))
        assert moved_tokens(serving, text(1, 50), text(2, 100)) == 0
        assert moved_tokens(serving, text(3, 30), text(2, 100), text(4, 100)) == 100
        found.append(moved_tokens(serving, text(5, 20), text(4, 100)))
    assert found == [0, 99]  # a prompt's last token is always computed


def test_donors_of_the_device_tier_move_down_and_up_again():
    device = 4 * 32 * 64  # four blocks: one donor
    serving = Serving(load_settings(policy="position_fix", device_bytes=device), TINY_POOL)
    for seed in (1, 2, 3):
        moved_tokens(serving, text(seed, 120))
    assert moved_tokens(serving, text(9, 10), text(1, 120)) == 119
    assert moved_tokens(serving, text(8, 10), text(1, 120)) == 119
    stats = serving.donors.catalog.stats()
    assert stats.offloaded >= 2
    assert stats.promoted >= 1
    assert stats.device_bytes <= device


def test_namespaces_share_nothing_and_a_prompt_that_never_fits_is_served_cold():
    serving = Serving(load_settings(policy="position_fix"), TINY_POOL)
    prompt = text(1, 300)
    assert serving.serve("one", prompt) == (0, (), "no_donor_match")
    assert serving.serve("other", prompt) == (0, (), "no_donor_match")
    assert serving.serve("one", prompt) == (288, (), "prefix_covers_prompt")
    assert serving.serve("one", text(2, 256 * 32 + 1)) == (0, (), "longer_than_pool")
    moved = serving.serve("one", np.concatenate([text(3, 20), prompt]))
    assert [span.donor_id for span in moved.spans] == ["1"]


def observations(costs, noise=0.0):
    random = np.random.default_rng(7)
    found = []
    for _ in range(80):
        c, r = int(random.integers(50, 8_000)), int(random.integers(0, 8_000))
        ttft = costs[0] + costs[1] * c + costs[2] * r + costs[3] * c * (r + c / 2)
        found.append(Observation(ttft * float(random.uniform(1 - noise, 1 + noise)), c, r))
    return found


@settings(max_examples=40)
@given(
    st.floats(1.0, 100.0),
    st.floats(0.005, 0.5),
    st.one_of(st.just(0.0), st.floats(1e-3, 1e-2)),
    st.one_of(st.just(0.0), st.floats(1e-6, 1e-5)),
)
def test_known_costs_are_found(intercept, computed, reused, pair):
    model = LatencyModel.fitted(observations((intercept, computed, reused, pair)), "a test")
    found = (model.intercept_ms, model.computed_ms, model.reused_ms, model.pair_ms)
    assert found == pytest.approx((intercept, computed, reused, pair), rel=1e-3, abs=1e-9)


def test_a_cost_below_nothing_is_left_out():
    model = LatencyModel.fitted(observations((20.0, 0.1, -0.001, 0.0), noise=0.2), "a test")
    assert model.reused_ms == 0.0
    assert model.computed_ms == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    "seen",
    [[], [Observation(10.0, 100, 0)] * 50, [Observation(10.0 + n, 100 * n, 0) for n in range(1, 5)]],
    ids=["none", "all alike", "too few"],
)
def test_too_little_to_fit_is_refused(seen):
    with pytest.raises(ConfigurationError, match=r"a test: .* a latency model needs at least 5 and 3"):
        LatencyModel.fitted(seen, "a test")


def test_what_a_check_adds_is_no_part_of_the_fit():
    seen = observations((20.0, 0.1, 0.01, 0.0))
    checked = [replace(each, ttft_ms=each.ttft_ms + 0.02 * each.reused, is_checked=True) for each in seen]
    plain, both = LatencyModel.fitted(seen, "a test"), LatencyModel.fitted([*checked, *seen], "a test")
    assert plain.check_ms is None
    assert both.check_ms == pytest.approx(0.02)
    assert replace(both, check_ms=None) == plain


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('[{"ttft_ms": 4}]', "does not hold observations: Field required"),
        ('[{"ttft_ms": 0, "computed": 4, "reused": 0}]', "should be greater than 0"),
        ('[{"ttft_ms": 1, "computed": 0, "reused": 9}]', "should be greater than or equal to 1"),
        ('"ttft_ms"', "does not hold observations"),
        (None, "does not hold observations: No such file"),
    ],
)
def test_a_file_without_observations_is_refused(content, sentence, tmp_path):
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=sentence):
        recorded_observations(path)
