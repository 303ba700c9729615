"""Latent attention (MLA) inside vLLM: rows of plans go through its own layers, and what is moved is one row a token."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config

from engine_wrapper.vllm import attention
from kernels.layout import PagedKv
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.conftest import save_tiny_model
from tests.engine_wrapper.vllm.conftest import (
    DOCUMENT,
    DONOR,
    LONG,
    MOVED,
    NEW,
    Answered,
    Served,
    near,
    some,
    taught,
    while_another_decodes,
)
from tests.engine_wrapper.vllm.conftest import cold_answers as answered
from tests.engine_wrapper.vllm.latent_on_cpu import complete, take_prompts_as_in_0_25
from tests.engine_wrapper.vllm.place import LATENT, on_card
from tests.kernels.builders import token_rows

Engine = Callable[..., Served]
Models = Callable[..., Path]
Cold = Callable[..., Answered]

# FLASH_ATTN_MLA takes up to 512 rows as a decode.
FAR = [*some(520), *DONOR, *some(8)]
LAYERS, CHANNELS = 3, 576
# Random models choose their tokens narrowly: in 16 bit only the first ones have to be the same.
TOKENS = 4 if torch.cuda.is_available() else 16
# A card computes them in 16 bit.
ROUNDING = 5e-2 if torch.cuda.is_available() else 0.0
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = ("boundary", {"recompute_boundary_layer": LAYERS})
# A card's kernels take no smaller heads.
SIZES = {"vocab_size": 2000, "max_position_embeddings": 2048, "qk_nope_head_dim": 128, "v_head_dim": 128}
FORMS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "kimi_k2": {},
    "no rank of queries": {"q_lora_rank": None},
    "one layer": {"num_hidden_layers": 1, "first_k_dense_replace": 1},
}


@pytest.fixture(scope="module", autouse=True)
def _latent_on_cpu():
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            complete(patch)
        patch.setattr(DeepseekV3Config, "model_type", "deepseek_v3")
        with on_card(LATENT):
            yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Saved before vLLM reads a Kimi, from when on Transformers' class is one of that."""
    made = {
        form: save_tiny_model("deepseek_v3", tmp_path_factory.mktemp("latent"), **SIZES, **own)
        for form, own in FORMS.items()
    }
    file = made["kimi_k2"] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    return lambda form="deepseek_v3": made[form]


@pytest.fixture(scope="module")
def cold(models):
    """Answers of vLLM without a connector."""

    @cache
    def asked(form):
        return answered(DONOR, MOVED, FAR, NEW, LONG, model=models(form))

    return lambda prompt, form="deepseek_v3": asked(form)(prompt)


def assert_cold(answer, expected):
    assert answer.tokens[:TOKENS] == expected.tokens[:TOKENS]
    assert near(answer.logprobs[:TOKENS], expected.logprobs[:TOKENS], ROUNDING)


def latents(served, blocks, positions):
    """What lies in the pool of a request, [layers, tokens, channels]."""
    parts = served.worker._forward._parts
    kv = PagedKv(parts.pool, torch.tensor(blocks), parts.geometry)
    return token_rows(kv, torch.tensor(positions))[:, 0, :, 0].clone()


@pytest.mark.every_version
def test_without_a_plan_answers_are_those_of_an_engine_without_us(engine, models, cold):
    expected = [cold(prompt) for prompt in (DONOR, NEW)]
    served = engine("position_fix", model=models())
    for prompt, answer in zip((DONOR, NEW), expected, strict=True):
        assert_cold(served.ask(prompt, max_tokens=16), answer)
    assert served.runtime.mode.value == "wrapper"
    assert served.worker._forward._parts.geometry.bytes_per_token(torch.bfloat16) == LAYERS * CHANNELS * 2


@pytest.mark.parametrize(
    ("form", "options"),
    [
        pytest.param("deepseek_v3", {}, marks=pytest.mark.every_version),
        ("kimi_k2", {}),
        ("no rank of queries", {}),
    ],
    ids=str,
)
def test_with_all_layers_computed_again_answers_are_cold_ones(engine, models, cold, form, options):
    expected = cold(MOVED, form)
    served = taught(engine(*WHOLE, model=models(form), **options))
    assert_cold(served.ask(MOVED, max_tokens=16), expected)
    assert served.offered >= len(DOCUMENT)
    assert not served.runtime.faults


@pytest.mark.every_version
@pytest.mark.parametrize("prompt", [MOVED, FAR], ids=["a short run in front", "more rows in front than a decode has"])
def test_a_moved_run_is_that_of_a_cold_run_where_one_layer_is_all(engine, models, cold, prompt):
    expected = cold(prompt, "one layer")
    served = taught(engine("position_fix", model=models("one layer")))
    assert_cold(served.ask(prompt, max_tokens=16), expected)
    assert served.offered >= len(DOCUMENT)
    assert not served.runtime.faults


def test_neighbours_of_a_plan_are_answered_as_alone(engine, models, cold, built):
    expected = [cold(prompt) for prompt in (NEW, MOVED, LONG)]
    served = taught(engine(*WHOLE, model=models()))
    found = served.ask(NEW, MOVED, LONG, max_tokens=16)
    assert served.offered_of(3)[1] >= len(DOCUMENT)
    for answer, alone in zip(found, expected, strict=True):
        assert_cold(answer, alone)
    # And while another one decodes.
    served.forget()
    built.clear()
    tokens = {name: each[:TOKENS] for name, each in while_another_decodes(served).items()}
    assert tokens == {"new": expected[0].tokens[:TOKENS], "moved": expected[1].tokens[:TOKENS]}
    # A card's backend may count the plan's rows as a decode's.
    assert any(sum(each) == 2 for each in built) if ROUNDING else (1, 1) in built
    assert not served.runtime.faults


def test_runs_of_every_length_give_the_engines_own_rows(engine, models, many_runs, built):
    """In the self-check, whose plans are over the engine's own KV."""
    served = engine("position_fix", model=models())
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
    assert max(sum(each) if ROUNDING else each[1] for each in built) > 15
    assert not served.runtime.faults


def test_the_self_check_computes_runs_as_prompts_too(engine, models, monkeypatch):
    """FLASH_ATTN_MLA takes those of the check for decodes."""
    found, stock = list[int](), attention._built

    def told(builder, common):
        found.append(builder.reorder_batch_threshold)
        return stock(builder, common)

    monkeypatch.setattr(attention, "_built", told)
    served = engine("position_fix", model=models())
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
    own = served.worker._forward._parts.builder.reorder_batch_threshold
    assert set(found) == {own, 0}
    assert own > 0


@pytest.mark.every_version
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card's vLLM takes prompts in its own way")
def test_runs_may_stand_in_any_order_where_vllm_takes_those_with_tokens_before_them_first(
    engine, models, many_runs, built, monkeypatch
):
    take_prompts_as_in_0_25(monkeypatch, workspace_rows=64)
    served = engine("position_fix", model=models())
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
    assert max(prompts for _, prompts in built) > 15
    assert not served.runtime.faults


def test_moved_rows_are_those_of_the_text_at_its_new_place(engine, models, blocks):
    """In the lowest layer, where they depend on token and position alone; and their deviation in the next is found."""
    own = range(70, 70 + len(DOCUMENT))
    served = engine("exact", model=models())
    served.ask(MOVED, max_tokens=1)
    fresh = latents(served, blocks, own)
    served.ask(DONOR, max_tokens=1)
    served = engine("position_fix", model=models())
    served.ask(DONOR, max_tokens=1)
    before = latents(served, blocks, range(20, 20 + len(DOCUMENT)))
    taught(served)
    assert served.ask(MOVED, max_tokens=1).cached >= len(DOCUMENT)
    assert served.scheduler.outcomes.of(served.last).reused_tokens == len(DOCUMENT)
    moved = latents(served, blocks, own)
    torch.testing.assert_close(moved[0], fresh[0], rtol=1e-4, atol=ROUNDING or 1e-3)
    assert torch.equal(moved[..., :512], before[..., :512])
    assert float((moved[0, :, 512:] - before[0, :, 512:]).abs().max()) > 1.0
    # The check compares whole rows of the layer above.
    deviations = (fresh[1] - moved[1]).norm(dim=1) / moved[1].norm(dim=1)
    namespace, geometry = served.scheduler.namespace, served.worker._forward._parts.geometry
    profile = models() / "profile.json"
    for threshold in (0.2, 0.9):
        check = ProfileCheck(layer=1, threshold=threshold)
        ReuseProfile.made_for(namespace, geometry, policy="verified", check=check).write(profile)
        settings = {"policy": "verified", "profile": str(profile), "profile_trial": True}
        served = taught(engine("boundary", settings, model=models()))
        served.ask(MOVED, max_tokens=1)
        found = served.scheduler.outcomes.of(served.last)
        kept = deviations[deviations <= threshold]
        assert found.figures["largest_kept"] == pytest.approx(float(kept.max()), rel=1e-3, abs=ROUNDING)
        # A token may lie at the threshold.
        assert found.reused_tokens == pytest.approx(len(kept), abs=2 if ROUNDING else 0)
        assert found.checked_tokens == len(DOCUMENT)
        assert not served.runtime.faults


def test_checked_rows_that_deviate_are_computed_and_the_answer_is_cold(engine, models, cold, tmp_path):
    expected = cold(MOVED)
    served = engine("position_fix", model=models())
    namespace, geometry = served.scheduler.namespace, served.worker._forward._parts.geometry
    check = ProfileCheck(layer=1, threshold=1e-6)
    ReuseProfile.made_for(namespace, geometry, policy="verified", check=check).write(tmp_path / "profile.json")
    settings = {"policy": "verified", "profile": str(tmp_path / "profile.json"), "profile_trial": True}
    served = taught(engine("boundary", settings, model=models()))
    assert_cold(served.ask(MOVED, max_tokens=16), expected)
    found = served.scheduler.outcomes.of(served.last)
    assert (found.checked_tokens, found.reused_tokens) == (len(DOCUMENT), 0)
    assert not served.runtime.faults


def test_another_way_to_compute_prompts_is_refused_by_name(engine, models, cold, monkeypatch):
    expected = cold(MOVED)
    monkeypatch.setattr(attention, "PREFILL_BACKENDS", ("ANOTHER",))
    served = engine("position_fix", model=models())
    served.ask(DONOR, max_tokens=1)
    answer = served.ask(MOVED, max_tokens=16)
    assert (answer.cached, answer.tokens) == (0, expected.tokens)
    assert served.runtime.refusal == "attention_backend"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card's vLLM says itself whether it pads")
def test_prompts_of_padded_values_are_refused_where_vllm_joins_their_parts_wrong(engine, models, monkeypatch):
    """Before 0.28, on a card without FlashAttention 3 and 4."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    monkeypatch.setattr(MLAPrefillBackend, "requires_v_padding", True, raising=False)
    assert engine("position_fix", model=models()).runtime.refusal is None
    context = MLACommonPrefillMetadata.ChunkedContextMetadata
    monkeypatch.setattr(context, "prefill_tokens_with_context", None, raising=False)
    assert engine("position_fix", model=models()).runtime.refusal == "attention_backend"
