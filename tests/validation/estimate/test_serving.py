"""What is estimated is what an engine then does: the same prompts through both, with much memory and with little."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.pool_facts import PoolFacts
from semblend_trt.reuse_profile import ProfileCheck
from tests.engine_wrapper.embedded_llm import drain
from tests.semblend_trt.discovery.planning import profile
from validation.embedded_engine import ONE_TOKEN, RANDOM_WEIGHTS, open_llm
from validation.estimate.serving import Serving, line_of
from validation.models import load

VOCABULARY = 256


def traffic(seed, count=24):
    """Prompts of a system prompt, some of six documents in any order, and a question; some prompts come again."""
    random = np.random.default_rng(seed)
    system = random.integers(0, VOCABULARY, 40)
    documents = [random.integers(0, VOCABULARY, int(random.integers(70, 160))) for _ in range(6)]
    prompts: list[npt.NDArray[np.int32]] = []
    for _ in range(count):
        if prompts and random.random() < 0.15:
            prompts.append(prompts[int(random.integers(len(prompts)))])
            continue
        chosen = random.choice(6, int(random.integers(1, 4)), replace=False)
        parts = [system, *(documents[each] for each in chosen), random.integers(0, VOCABULARY, 30)]
        prompts.append(np.concatenate(parts).astype(np.int32))
    return prompts


@pytest.mark.parametrize(
    ("pool_tokens", "host_tokens"), [(8_192, 8_192), (1_024, 1_200)], ids=["room for all", "little room"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_engine_reuses_what_was_estimated(seed, pool_tokens, host_tokens, tiny_qwen2_path):
    runner = load(str(tiny_qwen2_path), "cpu", "float32")
    facts = runner.facts
    geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, 32)
    host_bytes = host_tokens * geometry.bytes_per_token(runner.dtype)
    settings = load_settings(policy="position_fix", host_bytes=host_bytes, lookup_deadline_ms=60_000)
    serving = Serving(settings, PoolFacts(geometry, pool_tokens // 32, runner.dtype))
    variables = {
        "POLICY": "position_fix",
        "HOST_BYTES": str(host_bytes),
        **RANDOM_WEIGHTS,
    }
    found, estimated = [], []
    with open_llm(tiny_qwen2_path, runner, variables, pool_tokens=pool_tokens, max_seq_len=1_024) as llm:
        for line, prompt in enumerate(traffic(seed), 1):
            output = llm.generate([prompt.tolist()], ONE_TOKEN)[0]
            drain(llm)
            report = llm.connector_scheduler.reuse_of(output.request_id)
            found.append((report.exact_prefix_tokens, report.offered_tokens, report.reason))
            served = serving.serve(line, "", prompt)
            estimated.append((served.prefix, sum(span.length for span in served.spans), served.reason))
    assert estimated == found
    assert sum(offered for _, offered, _ in found) > 0
    assert (serving.stats().evicted > 0) is (host_tokens == 1_200)


TINY_POOL = PoolFacts(KvGeometry(4, 1, 16, 32, kv_factor=1), 256, torch.int8)


def text(seed, tokens=100):
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype(np.int32)


def moved_tokens(serving, *parts):
    return sum(span.length for span in serving.serve(1, "", np.concatenate(parts)).spans if not span.exact)


def test_with_a_profile_what_stands_behind_moved_text_is_reused_up_to_its_generation():
    """A prompt leaves the text behind its moved one as a donor only where a profile allows that."""
    found = []
    for generations in (0, 1):
        check = ProfileCheck(layer=1, threshold=0.1)
        settings = load_settings(policy="verified", min_reuse_ratio=0.2)
        serving = Serving(settings, TINY_POOL, profile("verified", check=check, generations=generations))
        assert moved_tokens(serving, text(1, 50), text(2)) == 0
        assert moved_tokens(serving, text(3, 30), text(2), text(4)) == 100
        found.append(moved_tokens(serving, text(5, 20), text(4)))
    assert found == [0, 99]  # a prompt's last token is always computed


def test_donors_of_the_device_tier_move_down_and_up_again():
    device = 4 * 32 * 64  # four blocks: one donor
    serving = Serving(load_settings(policy="position_fix", device_bytes=device), TINY_POOL)
    for seed in (1, 2, 3):
        moved_tokens(serving, text(seed, 120))
    assert moved_tokens(serving, text(9, 10), text(1, 120)) == 119
    assert moved_tokens(serving, text(8, 10), text(1, 120)) == 119
    stats = serving.stats()
    assert stats.offloaded >= 2
    assert stats.promoted >= 1
    assert stats.device_blocks_used <= 4


def test_namespaces_share_nothing_and_a_prompt_that_never_fits_is_served_cold():
    serving = Serving(load_settings(policy="position_fix"), TINY_POOL)
    prompt = text(1, 300)
    assert serving.serve(7, "one", prompt)[1:] == (0, 0, (), "no_donor_match")
    assert serving.serve(8, "other", prompt)[1:] == (0, 0, (), "no_donor_match")
    again = serving.serve(9, "one", prompt)
    assert (again.prefix_alone, again.prefix, again.reason) == (288, 288, "prefix_covers_prompt")
    assert serving.serve(10, "one", text(2, 256 * 32 + 1)).reason == "longer_than_pool"
    moved = serving.serve(11, "one", np.concatenate([text(3, 20), prompt]))
    assert [line_of(span.donor_id) for span in moved.spans] == [7]


def test_a_conversation_is_estimated_to_take_the_room_of_its_last_turn():
    geometry = KvGeometry(2, 1, 8, 32)
    room = 1_700 * geometry.bytes_per_token(torch.float32)
    serving = Serving(load_settings(policy="exact", host_bytes=room), PoolFacts(geometry, 4_096, torch.float32))
    said = np.random.default_rng(1).integers(0, VOCABULARY, 1_600).astype(np.int32)
    for turn in range(1, 17):
        serving.serve(turn, "", said[: turn * 100])
    stats = serving.stats()
    assert (stats.ready, stats.evicted) == (1, 0)
    assert stats.used_bytes == 1_600 * geometry.bytes_per_token(torch.float32)
