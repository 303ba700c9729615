"""Llama 4 inside vLLM: layers with chunks and RoPE, and some with neither, through vLLM's own attention and ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine_wrapper.vllm import engine_spec
from engine_wrapper.vllm.attention import VllmRows
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.conftest import save_tiny_model, save_with_images
from tests.engine_wrapper.vllm.conftest import (
    DOCUMENT,
    DONOR,
    MOVED,
    Answered,
    Served,
    cold_answers,
    near,
    needs_torchvision,
    some,
    taught,
)

Engine = Callable[..., Served]
Models = Callable[[tuple[int, ...]], Path]

pytestmark = pytest.mark.usefixtures("blocks_for_windows")

# The document is four chunks long. Heads as wide as vLLM's attention on a CPU needs them, and room for the prompts.
CHUNK = 128
SIZES: dict[str, Any] = {
    "attention_chunk_size": CHUNK,
    "head_dim": 32,
    "vocab_size": 2000,
    "max_position_embeddings": 2048,
}
# Which layers have chunks and RoPE (1), from the lowest on.
MIXED, LOWER = (1, 0, 1), (1, 1, 0)
WHOLE = ("boundary", {"recompute_boundary_layer": 3})
# Texts in front of the document, which end where a chunk does.
IN_DONOR, IN_PROMPT, NEW = some(CHUNK), some(3 * CHUNK), some(60)
EARLY, LATER = 40, 50
SCALED = {"override_generation_config": {"attn_temperature_tuning": True}}


def placed(early=0, later=0):
    """A donor and a prompt whose document begins so many tokens before a chunk's end, and `later` in the prompt."""
    return [*IN_DONOR[early:], *DOCUMENT], [*IN_PROMPT[early:], *NEW[:later], *DOCUMENT, *NEW[-30:]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @cache
    def model(turning):
        folder = tmp_path_factory.mktemp("llama4")
        return save_tiny_model("llama4_text", folder, no_rope_layers=list(turning), **SIZES)

    return model


@pytest.fixture(scope="module")
def cold(models):
    """The answer of vLLM without a connector."""

    @cache
    def answer(turning, prompt=tuple(MOVED), is_scaled=False):
        return cold_answers(prompt, model=models(turning), **SCALED if is_scaled else {})(prompt)

    return answer


def asked(served, prompt=MOVED):
    """The answer to a prompt, most of which is not computed by vLLM."""
    answer: Answered = served.ask(prompt, max_tokens=16)
    assert served.offered >= len(DOCUMENT) - CHUNK
    assert not served.runtime.faults
    return answer


def is_cold(answer, cold):
    return answer.tokens == cold.tokens and near(answer.logprobs, cold.logprobs)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}, {"enforce_eager": False}], ids=str)
def test_with_all_layers_computed_again_answers_are_cold_ones(engine, models, cold, options):
    wanted = cold(MIXED)
    served = taught(engine(*WHOLE, model=models(MIXED), **options))
    assert is_cold(asked(served), wanted)
    assert served.scheduler.namespace.backend_cache_layout.count("/") == 2


@needs_torchvision
def test_a_model_that_takes_images_is_served_for_text_alone(engine, models, cold, tmp_path):
    """As Llama 4 is published."""
    wanted, model = cold(MIXED), save_with_images(models(MIXED), tmp_path)
    served = taught(engine(*WHOLE, model=model, language_model_only=True))
    assert is_cold(asked(served), wanted)


def test_where_queries_are_scaled_by_their_position_answers_are_cold_ones_too(engine, models, cold):
    """vLLM does so where it takes long prompts; the KV is that of another engine then."""
    wanted = cold(MIXED, is_scaled=True)
    assert not is_cold(wanted, cold(MIXED))
    served = taught(engine(*WHOLE, model=models(MIXED), **SCALED))
    assert is_cold(asked(served), wanted)
    assert served.scheduler.namespace.backend_cache_layout.endswith("/scaled")


@pytest.mark.parametrize(
    ("early", "heads", "later", "cold_ones"),
    [(0, 0, 0, True), (0, 0, 1, False), (EARLY, EARLY, 0, True), (EARLY, EARLY - 1, 0, False)],
)
def test_from_a_chunks_first_token_on_a_moved_run_is_that_of_a_cold_run(
    engine,
    models,
    cold,
    early,
    heads,
    later,
    cold_ones,
    monkeypatch,
):
    """Up to the first layer with full attention K and V depend on the tokens of their chunk alone."""
    donor, prompt = placed(early, later)
    wanted, attended = cold(LOWER, tuple(prompt)), list[bool]()
    policy, settings = ("epic", {"epic_tokens": heads}) if heads else ("position_fix", {})
    served = taught(engine(policy, settings, model=models(LOWER)), donor)
    assert served.worker._forward._sparse  # the self-check has found our attention to be vLLM's
    for by_ours in (False, True):
        monkeypatch.setattr(VllmRows, "_stand_apart", lambda _, by_ours=by_ours: attended.append(by_ours) or by_ours)
        assert is_cold(asked(served, prompt), wanted) == cold_ones
        served.forget()
    assert set(attended) == {False, True}


def test_keys_that_turn_as_those_of_transformers_are_not_vllms(engine, models, monkeypatch, caplog):
    monkeypatch.setattr(engine_spec, "LLAMA4", ())
    served = engine("position_fix", model=models(LOWER))
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "stock"
    assert "(rope_unknown): keys that turn as the model's configuration says" in caplog.text


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("check", [{}, {"sample_every": 4, "sample_threshold": 0.0}], ids=str)
def test_what_a_check_above_full_attention_finds_to_deviate_is_computed(engine, models, cold, tmp_path, check):
    wanted = cold(MIXED)
    served = engine("position_fix", model=models(MIXED))
    made = ProfileCheck(**{"layer": 2, "threshold": 0.0, "max_span_share": 1.0, **check})
    namespace, geometry = served.scheduler.namespace, served.runtime.pool.geometry
    ReuseProfile.made_for(namespace, geometry, policy="verified", check=made).write(tmp_path / "profile.json")
    settings = {"policy": "verified", "profile": str(tmp_path / "profile.json"), "profile_trial": True}
    served = taught(engine("exact", settings, model=models(MIXED)))
    assert is_cold(asked(served), wanted)
    report = served.scheduler.outcomes.of(served.last)
    assert report.recomputed_tokens == report.offered_tokens > len(DOCUMENT) // 2


def test_a_run_that_is_cut_into_pieces_shorter_than_a_span_is_refused_by_name(engine, models, cold):
    donor, prompt = placed(later=LATER)
    wanted = cold(LOWER, tuple(prompt))
    served = taught(engine("position_fix", {"min_span_tokens": CHUNK - LATER + 1}, model=models(LOWER)), donor)
    answer = served.ask(prompt, max_tokens=16)
    assert (answer.cached, is_cold(answer, wanted)) == (0, True)
    assert served.scheduler.outcomes.of(served.last).reason == "chunk_edge"


def test_layers_with_other_chunks_than_the_models_are_refused_by_name(engine, models, monkeypatch):
    from vllm.model_executor.layers.attention import ChunkedLocalAttention

    stock = ChunkedLocalAttention.__init__

    def shorter(self, *given, attention_chunk_size, **options):
        stock(self, *given, attention_chunk_size=attention_chunk_size // 2, **options)

    monkeypatch.setattr(ChunkedLocalAttention, "__init__", shorter)
    assert engine("position_fix", model=models(LOWER)).runtime.refusal == "sliding_window"
