"""Latent rows (MLA) in e4m3 inside a real vLLM: on a card with TRITON_MLA, on a CPU, where no backend of vLLM's own
stores them so, with one of these tests in its place (`latent_on_cpu.py`)."""

import math
from collections.abc import Callable

import pytest
import torch
from transformers import DeepseekV3Config

from engine_wrapper import self_check
from engine_wrapper.vllm import attention, planned_forward
from kernels.layout import PagedKv
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.conftest import save_tiny_model
from tests.engine_wrapper.vllm.conftest import (
    DOCUMENT,
    DONOR,
    LONG,
    MOVED,
    NEW,
    Served,
    cold_answers,
    near,
    serving,
    taught,
    while_another_decodes,
)
from tests.engine_wrapper.vllm.latent_on_cpu import complete, scale_by, store_in_fp8
from tests.engine_wrapper.vllm.place import LATENT_IN_FP8, on_card
from tests.kernels.builders import token_rows

Engine = Callable[..., Served]

FP8 = {"kv_cache_dtype": "fp8"}
LAYERS, FREE = 3, 512
# As a checkpoint would have them: no powers of 2, and another one in each layer.
SCALES = {0: 0.013, 1: 0.02, 2: 0.007}
SIZES = {"vocab_size": 2000, "max_position_embeddings": 2048, "qk_nope_head_dim": 128, "v_head_dim": 128}
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = ("boundary", {"recompute_boundary_layer": LAYERS})
# Of one value rounded to the nearest of eight between powers of 2.
ROUNDING = 2**-4
ON_CARD = torch.cuda.is_available()
# A card computes in 16 bit, so that a value between two of e4m3 ends at either: random models choose their tokens
# narrowly, and only the first ones have to be the same.
TOKENS, NEAR, SAME = (4, 0.1, 0.98) if ON_CARD else (16, 0.0, 1.0)


@pytest.fixture(scope="module", autouse=True)
def _latent_in_fp8_on_cpu():
    with pytest.MonkeyPatch.context() as patch, on_card(LATENT_IN_FP8):
        if not ON_CARD:
            complete(patch)
            store_in_fp8(patch)
        scale_by(patch, SCALES)
        patch.setattr(DeepseekV3Config, "model_type", "deepseek_v3")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model("deepseek_v3", tmp_path_factory.mktemp("latent"), **SIZES)


@pytest.fixture(scope="module")
def cold(model):
    """Answers of vLLM without a connector, with its cache in e4m3."""
    return cold_answers(DONOR, MOVED, NEW, LONG, model=model, **FP8)


def assert_cold(answer, expected):
    assert answer.tokens[:TOKENS] == expected.tokens[:TOKENS]
    assert near(answer.logprobs[:TOKENS], expected.logprobs[:TOKENS], NEAR)


def stored(served, blocks, positions):
    """What lies in the pool of a request, e4m3 [layers, tokens, channels]."""
    parts = served.worker._forward._parts
    kv = PagedKv(parts.pool, torch.tensor(blocks), parts.geometry)
    return token_rows(kv, torch.tensor(positions))[:, 0, :, 0].clone()


@pytest.mark.every_version
def test_answers_are_vllms_own_without_a_plan_and_with_all_layers_computed_again(engine, model, cold):
    expected = {prompt: cold(given) for prompt, given in (("new", NEW), ("moved", MOVED))}
    served = taught(engine(*WHOLE, model=model, **FP8))
    assert served.scheduler.namespace.kv_dtype == "float8_e4m3fn"
    parts = served.worker._forward._parts
    assert (parts.pool.dtype, parts.geometry.bytes_per_token(parts.pool.dtype)) == (torch.float8_e4m3fn, LAYERS * 576)
    assert_cold(served.ask(NEW, max_tokens=16), expected["new"])
    assert_cold(served.ask(MOVED, max_tokens=16), expected["moved"])
    assert served.offered >= len(DOCUMENT)
    assert not served.runtime.faults


def test_a_plan_reads_what_the_engine_has_stored_whatever_its_runs_are(engine, model, many_runs, built, monkeypatch):
    """But for values between two of e4m3, where a run's own rows are read as they are stored; else not by far."""
    if not ON_CARD:
        monkeypatch.setattr(self_check, "_ROUNDED_BOUND", 5e-3)
    served = engine("position_fix", model=model, **FP8)
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
    assert max(prompts for _, prompts in built) > 15
    assert not served.runtime.faults
    monkeypatch.setattr(planned_forward, "own_rows_as_stored", None)
    served = engine("exact", model=model, **FP8)
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.refusal == "self_check"


@pytest.mark.every_version
@pytest.mark.parametrize("options", [FP8, {}], ids=["fp8", "auto"])
def test_more_runs_than_a_backend_has_room_for_decodes_are_all_prompts(
    engine,
    model,
    many_runs,
    built,
    monkeypatch,
    options,
):
    if not ON_CARD:
        monkeypatch.setattr(attention, "RESERVING_BACKENDS", ("CPU_MLA",))
    served = engine("position_fix", model=model, max_num_seqs=4, **options)
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
    assert max(map(sum, built)) > 15
    assert all(decodes == 0 for decodes, prompts in built if decodes + prompts > 4)
    own = served.worker._forward._parts.builder
    assert (own.vllm_config.scheduler_config.max_num_seqs, own.reorder_batch_threshold) == (4, 1)
    assert not served.runtime.faults


def test_neighbours_of_a_plan_are_answered_as_alone(engine, model, cold):
    expected = [cold(prompt) for prompt in (NEW, MOVED, LONG)]
    served = taught(engine(*WHOLE, model=model, **FP8))
    found = served.ask(NEW, MOVED, LONG, max_tokens=16)
    assert served.offered_of(3)[1] >= len(DOCUMENT)
    for answer, alone in zip(found, expected, strict=True):
        assert_cold(answer, alone)
    assert not served.runtime.faults


def test_a_plan_beside_a_decode_is_answered_as_vllm_answers_there(engine, model, built):
    """Beside other rows sums of another order end at the next number of e4m3 here and there, in vLLM itself too."""
    stock = serving(model, enable_prefix_caching=False, **FP8)
    try:
        expected = while_another_decodes(stock)
    finally:
        stock.close()
    served = taught(engine(*WHOLE, model=model, **FP8))
    built.clear()
    found = while_another_decodes(served)
    assert {name: each[:TOKENS] for name, each in found.items()} == {
        name: each[:TOKENS] for name, each in expected.items()
    }
    assert (1, 1) in built
    assert not served.runtime.faults


def test_moved_rows_are_the_donors_bytes_and_those_that_turn_are_rounded_once_more(engine, model, blocks):
    """In the lowest layer, where they depend on token and position alone; and a check compares what is stored."""
    own = range(70, 70 + len(DOCUMENT))
    served = engine("exact", model=model, **FP8)
    served.ask(MOVED, max_tokens=1)
    fresh = stored(served, blocks, own)
    served.ask(DONOR, max_tokens=1)
    served = engine("position_fix", model=model, **FP8)
    served.ask(DONOR, max_tokens=1)
    before = stored(served, blocks, range(20, 20 + len(DOCUMENT)))
    taught(served)
    assert served.ask(MOVED, max_tokens=1).cached >= len(DOCUMENT)
    moved = stored(served, blocks, own)
    as_bytes = [each[..., :FREE].contiguous().view(torch.uint8) for each in (moved, before, fresh)]
    assert torch.equal(as_bytes[0], as_bytes[1])
    assert float((as_bytes[0][0] == as_bytes[2][0]).float().mean()) >= SAME
    turned, wanted, unturned = (each[0, :, FREE:].float() for each in (moved, fresh, before))
    assert ROUNDING / 2 < float((turned - wanted).norm() / wanted.norm()) < 2 * ROUNDING
    assert float((unturned - wanted).norm() / wanted.norm()) > 4 * ROUNDING
    held, rows_there = moved[1].float(), fresh[1].float()
    deviations = (rows_there - held).norm(dim=1) / held.norm(dim=1)
    namespace, geometry = served.scheduler.namespace, served.worker._forward._parts.geometry
    check = ProfileCheck(layer=1, threshold=float(deviations.median()))
    ReuseProfile.made_for(namespace, geometry, policy="verified", check=check).write(model / "profile.json")
    settings = {"policy": "verified", "profile": str(model / "profile.json"), "profile_trial": True}
    served = taught(engine("boundary", settings, model=model, **FP8))
    served.ask(MOVED, max_tokens=1)
    found, kept = served.scheduler.outcomes.of(served.last), deviations[deviations <= check.threshold]
    assert found.checked_tokens == len(DOCUMENT)
    assert found.reused_tokens == pytest.approx(len(kept), abs=2)  # the median itself may lie on either side
    assert found.figures["largest_kept"] == pytest.approx(float(kept.max()), rel=1e-2)
    assert not served.runtime.faults


@pytest.mark.parametrize(("scale", "told"), [(0.0, "k_scale of 0.0"), (math.inf, "k_scale of inf")])
def test_a_scale_that_is_none_is_refused_with_its_value(engine, model, scale, told, monkeypatch, caplog):
    monkeypatch.setitem(SCALES, 1, scale)
    served = engine("position_fix", model=model, **FP8)
    assert served.runtime.refusal == "kv_scales"
    assert told in caplog.text


def test_another_fp8_than_e4m3fn_is_refused_by_name(engine, model, monkeypatch, caplog):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", lambda *_: True)
    served = engine("position_fix", model=model, **FP8)
    assert served.runtime.refusal == "kv_cache_dtype"
    assert "e4m3fnuz" in caplog.text
