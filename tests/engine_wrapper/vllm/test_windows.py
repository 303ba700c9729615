"""gpt-oss inside vLLM: windows in every other layer and sinks, through vLLM's own attention and through ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import is_available

from engine_wrapper import self_check
from engine_wrapper.vllm.attention import VllmRows
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.conftest import save_tiny_model
from tests.engine_wrapper.vllm.conftest import DOCUMENT, MOVED, Answered, Served, cold_answers, near, taught
from tests.engine_wrapper.vllm.place import exact

Engine = Callable[..., Served]
Models = Callable[[int], Path]
Cold = Callable[[int], Answered]

pytestmark = pytest.mark.usefixtures("blocks_for_windows")

# Several blocks long, and an eighth of the document.
WINDOW = 64
SIZES: dict[str, Any] = {
    "sliding_window": WINDOW,
    "head_dim": 32,
    "vocab_size": 2000,
    "max_position_embeddings": 2048,
    "layer_types": None,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @cache
    def model(layers):
        return save_tiny_model("gpt_oss", tmp_path_factory.mktemp("gpt-oss"), num_hidden_layers=layers, **SIZES)

    return model


@pytest.fixture(scope="module")
def cold(models):
    """The answer of vLLM without a connector."""

    @cache
    def answer(layers):
        return cold_answers(MOVED, model=models(layers))(MOVED)

    return answer


def asked(served):
    """The answer to a moved document, most of which is not computed by vLLM."""
    answer: Answered = served.ask(MOVED, max_tokens=16)
    assert served.offered >= len(DOCUMENT)
    assert not served.runtime.faults
    return answer


def is_cold(answer, cold):
    return answer.tokens == cold.tokens and near(answer.logprobs, cold.logprobs, 5e-2 if is_available() else 0.0)


@pytest.mark.parametrize("by_ours", [False, True], ids=["vLLM's attention", "our attention"])
@pytest.mark.parametrize(("heads", "cold_ones"), [(WINDOW - 1, True), pytest.param(WINDOW - 2, False, marks=exact)])
def test_a_window_reaches_as_far_into_a_moved_run(
    engine,
    models,
    cold,
    heads,
    cold_ones,
    by_ours,
    monkeypatch,
):
    """K and V above one layer with a window depend on the tokens within it: where the first `heads` of the run are
    computed, the others are those of a cold run if a window is no longer than that and the token itself."""
    if is_available():  # vLLM's attention takes float32 for TF32 there, ours does not
        monkeypatch.setattr(self_check, "_EXACT_BOUND", 1e-2)
    answer, attended = cold(2), list[bool]()
    served = taught(engine("epic", {"epic_tokens": heads}, model=models(2)))
    assert served.worker._forward._sparse  # the self-check has found our attention to be vLLM's
    stand_apart = VllmRows._stand_apart

    def chosen(rows):
        attended.append(by_ours or stand_apart(rows))
        return attended[-1]

    monkeypatch.setattr(VllmRows, "_stand_apart", chosen)
    assert is_cold(asked(served), answer) == cold_ones
    assert attended == [by_ours] * len(attended)
    assert attended


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 128}, {"enforce_eager": False}], ids=str)
def test_with_all_layers_computed_again_answers_are_cold_ones(engine, models, options):
    answer = cold_answers(MOVED, model=models(4), **options)(MOVED)  # a card rounds otherwise in other chunks
    served = taught(engine("boundary", {"recompute_boundary_layer": 4}, model=models(4), **options))
    assert is_cold(asked(served), answer)


def test_holes_in_a_window_are_computed(engine, models):
    """Runs of two donors with new text between them, shorter than the window."""
    first, second = DOCUMENT[:250], DOCUMENT[250:]
    prompt = [*MOVED[:70], *first, *range(100, 130), *second, *MOVED[-40:]]
    answer = cold_answers(prompt, model=models(2))(prompt)
    served = taught(engine("epic", {"epic_tokens": WINDOW - 1}, model=models(2)), first, second)
    found = served.ask(prompt, max_tokens=16)
    assert served.offered >= len(DOCUMENT)
    assert is_cold(found, answer)
    assert not served.runtime.faults


def checked_at(served, layer, folder, **changes):
    """Settings of a profile for this engine whose check in `layer` lets nothing pass."""
    check = ProfileCheck(**{"layer": layer, "threshold": 0.0, "max_span_share": 1.0, **changes})
    made = ReuseProfile.made_for(
        served.scheduler.namespace, served.runtime.pool.geometry, policy="verified", check=check
    )
    made.write(folder / "profile.json")
    return {"policy": "verified", "profile": str(folder / "profile.json"), "profile_trial": True}


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("changes", [{}, {"sample_every": 4, "sample_threshold": 0.0}], ids=str)
def test_what_a_check_above_full_attention_finds_to_deviate_is_computed(engine, models, cold, tmp_path, changes):
    answer = cold(4)
    settings = checked_at(engine("position_fix", model=models(4)), 2, tmp_path, **changes)
    served = taught(engine("exact", settings, model=models(4)))
    assert is_cold(asked(served), answer)
    report = served.scheduler.outcomes.of(served.last)
    assert report.recomputed_tokens == report.offered_tokens >= len(DOCUMENT)


def test_a_check_that_sees_no_further_than_a_window_is_refused_by_name(engine, models, cold, tmp_path, caplog):
    answer = cold(4)
    settings = checked_at(engine("position_fix", model=models(4)), 1, tmp_path)
    served = taught(engine("exact", settings, model=models(4)))
    found = served.ask(MOVED, max_tokens=16)
    assert (found.cached, is_cold(found, answer)) == (0, True)
    assert served.scheduler.outcomes.of(served.last).reason == "profile_check_layer"
    assert "check layer 1 has no layer with full attention below it; 2 is the lowest" in caplog.text


@pytest.mark.skipif(is_available(), reason="skipped: vLLM 0.25.1 does not start with such blocks on a card")
def test_a_window_shorter_than_a_block_is_refused_by_name(engine, models, cold):
    answer = cold(2)
    served = engine("position_fix", model=models(2), block_size=128)
    assert served.ask(MOVED, max_tokens=16).tokens == answer.tokens
    assert served.runtime.refusal == "window_below_block"


def test_layers_with_other_windows_than_the_models_are_refused_by_name(engine, models, monkeypatch):
    from vllm.model_executor.layers.attention import Attention

    stock = Attention.__init__

    def wider(self, *arguments, **options):
        if options.get("per_layer_sliding_window"):
            options["per_layer_sliding_window"] += 1
        stock(self, *arguments, **options)

    monkeypatch.setattr(Attention, "__init__", wider)
    served = engine("position_fix", model=models(2))
    assert served.runtime.refusal == "sliding_window"


def test_a_window_that_the_longest_prompt_outgrows_is_refused_by_name(engine, tmp_path):
    """As long as the model's positions, which its YaRN stretches."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 128}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    model = save_tiny_model("gpt_oss", tmp_path, **SIZES | {"sliding_window": 2048, "rope_parameters": yarn})
    assert engine("position_fix", model=model, max_model_len=2048).runtime.refusal is None
    assert engine("position_fix", model=model, max_model_len=4096).runtime.refusal == "sliding_window"
