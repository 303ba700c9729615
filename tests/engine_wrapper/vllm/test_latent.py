"""Latent attention (MLA) inside vLLM, in its own dtype and in e4m3: what is moved is one row a token."""

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter

import pytest
import torch
from transformers import DeepseekV3Config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from engine_wrapper import self_check
from engine_wrapper.vllm import attention, planned_forward
from kernels.layout import PagedKv, indexable
from kernels.rope import saturated
from tests.builders.vllm import (
    DOCUMENT,
    DONOR,
    FP8,
    LONG,
    MOVED,
    NEW,
    checked_at,
    near,
    on_card,
    scale_by,
    serving,
    some,
    taught,
    while_another_decodes,
)
from tests.engine_wrapper.watching import watched
from tests.kernels.builders import FP8 as E4M3
from tests.kernels.builders import token_rows
from tests.random_models import save_tiny_model

ON_CARD = torch.cuda.is_available()
PROMPTS_ON_CPU = "vllm.v1.attention.backends.mla.prefill.cpu_sdpa"  # from vLLM 0.32 on
pytestmark = [
    pytest.mark.every_version,
    pytest.mark.skipif(
        not ON_CARD and find_spec(PROMPTS_ON_CPU) is None,
        reason="skipped: this vLLM computes no prompts of a latent attention on a CPU",
    ),
]
# vLLM computes latent attention in 16 bit alone on a card, and of the backends that do so we take this one.
LATENT = {"dtype": "float16", "attention_backend": "FLASH_ATTN_MLA"}
LATENT_IN_FP8 = LATENT | {"attention_backend": "TRITON_MLA"}
# As a checkpoint would have them: no powers of 2, and another one in each layer.
SCALES = {0: (0.013,), 1: (0.02,), 2: (0.007,)}
# FLASH_ATTN_MLA takes up to 512 rows as a decode.
FAR = [*some(520), *DONOR, *some(8)]
LAYERS, CHANNELS, FREE = 3, 576, 512
# A card computes in 16 bit, and random models choose their tokens narrowly: only the first ones have to be the same.
TOKENS = 4 if ON_CARD else 8
WHOLE = ("boundary", {"recompute_boundary_layer": LAYERS})
# A card's kernels take no smaller heads.
SIZES = {"vocab_size": 2000, "max_position_embeddings": 2048, "qk_nope_head_dim": 128, "v_head_dim": 128}
FORMS = {
    "deepseek_v3": {},
    "kimi_k2": {},
    "no rank of queries": {"q_lora_rank": None},
    "one layer": {"num_hidden_layers": 1, "first_k_dense_replace": 1},
}
in_own_dtype = pytest.mark.parametrize("kv", [{}], ids=["own"], indirect=True)


def store_in_fp8(patch):
    """Have vLLM's CPU backend, which stores none in e4m3, store and read latent rows as TRITON_MLA does (0.28)."""
    stock = CPUMLAImpl
    update, decode, before = stock.do_kv_cache_update, stock.forward_mqa, stock._compute_prefill_context

    def stored(impl, latent, turning, cache, slots, kind, scale):
        if cache.dtype == torch.uint8:
            latent, turning = (saturated(each.float() / scale, E4M3).view(torch.uint8) for each in (latent, turning))
        update(impl, latent, turning, cache, slots, kind, scale)

    def attend(impl, q, cache, metadata, layer):
        if cache.dtype == E4M3:
            cache, table = _read(cache, metadata.decode.block_table, layer._k_scale, impl.kv_b_proj.params_dtype)
            metadata = replace(metadata, decode=replace(metadata.decode, block_table=table))
        return decode(impl, q, cache, metadata, layer)

    def context(impl, q, cache, metadata, scale):
        if cache.dtype != E4M3:
            return before(impl, q, cache, metadata, scale)
        cache, table = _read(cache, metadata.prefill.block_table, scale, q.dtype)
        metadata = replace(metadata, prefill=replace(metadata.prefill, block_table=table))
        kind, impl.kv_cache_dtype = impl.kv_cache_dtype, "auto"
        try:
            return before(impl, q, cache, metadata, scale)
        finally:
            impl.kv_cache_dtype = kind

    patch.setattr(CPUMLABackend, "supported_kv_cache_dtypes", ["auto", "fp8", "fp8_e4m3"])
    patch.setattr(stock, "do_kv_cache_update", stored)
    patch.setattr(stock, "forward_mqa", attend)
    patch.setattr(stock, "_compute_prefill_context", context)


def _read(cache, table, scale, dtype):
    """The blocks of a cache in e4m3 that a table names, in `dtype`, and the table of their places there."""
    blocks, places = table.unique(return_inverse=True)
    held = indexable(cache)[blocks.long()].view(E4M3).float() * scale
    return held.to(dtype), places.int()


@pytest.fixture(scope="module", autouse=True, params=[{}, FP8], ids=["own", "fp8"])
def kv(request):
    """Options of engines by which KV is stored."""
    is_fp8 = request.param == FP8
    with pytest.MonkeyPatch.context() as patch, on_card(LATENT_IN_FP8 if is_fp8 else LATENT):
        if is_fp8:
            scale_by(patch, MLAAttention, SCALES)
        if is_fp8 and not ON_CARD:
            store_in_fp8(patch)
        patch.setattr(DeepseekV3Config, "model_type", "deepseek_v3")
        yield request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Saved before vLLM reads a Kimi, from when on Transformers' class is one of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepseekV3Config, "model_type", "deepseek_v3")
        made = {
            form: save_tiny_model("deepseek_v3", tmp_path_factory.mktemp("latent"), **SIZES, **own)
            for form, own in FORMS.items()
        }
    file = made["kimi_k2"] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    return lambda form="deepseek_v3": made[form]


def assert_cold(served, answer, expected):
    is_fp8 = served.worker._forward._parts.pool.dtype == E4M3
    assert answer.tokens[:TOKENS] == expected.tokens[:TOKENS]
    assert near(answer.logprobs[:TOKENS], expected.logprobs[:TOKENS], ON_CARD * (0.1 if is_fp8 else 5e-2))


def stored(served, blocks, positions):
    """What lies in the pool of a request, [layers, tokens, channels]."""
    parts = served.worker._forward._parts
    kv = PagedKv(parts.pool, torch.tensor(blocks[-1]), parts.geometry)
    return token_rows(kv, torch.tensor(positions))[:, 0, :, 0].clone()


def proven(engine, model, **options):
    served = engine("position_fix", model=model, **options)
    served.ask(DONOR, max_tokens=1)
    return served


@pytest.mark.promise(
    "engines",
    "In vLLM latent rows in e4m3 come out as vLLM's own with all layers computed again, a plan reads what is stored "
    "whatever its runs are, moved rows are the donor's bytes but for the channels that turn, and scales that are "
    "none are refused by name",
)
def test_answers_are_vllms_own_without_a_plan_and_with_all_layers_computed_again(engine, models, kv):
    stock = serving(models(), enable_prefix_caching=False, **kv)
    expected = [stock.ask(prompt, max_tokens=8) for prompt in (NEW, MOVED)]
    stock.close()
    served = taught(engine(*WHOLE, model=models(), **kv))
    parts = served.worker._forward._parts
    if kv:
        assert served.scheduler.namespace.kv_dtype == "float8_e4m3fn"
    assert parts.geometry.bytes_per_token(parts.pool.dtype) == LAYERS * CHANNELS * parts.pool.dtype.itemsize
    for prompt, answer in zip((NEW, MOVED), expected, strict=True):
        assert_cold(served, served.ask(prompt, max_tokens=8), answer)
    assert served.offered >= len(DOCUMENT)


@pytest.mark.promise(
    "engines",
    "Plans over latent attention come out as cold runs, inside vLLM and in the embedded engine, and moved rows are "
    "those of the text at its new place",
)
@in_own_dtype
@pytest.mark.parametrize(
    ("policy", "form", "prompt"),
    [
        (WHOLE, "kimi_k2", MOVED),
        (WHOLE, "no rank of queries", MOVED),
        # A moved run is that of a cold run where one layer is all; a decode has fewer rows than come before `FAR`'s.
        (("position_fix",), "one layer", MOVED),
        (("position_fix",), "one layer", FAR),
    ],
    ids=["kimi_k2", "no rank of queries", "a short run in front", "more rows in front than a decode has"],
)
def test_answers_are_cold_ones_in_every_form(engine, models, policy, form, prompt):
    served = engine(*policy, model=models(form))
    expected = served.cold(prompt)
    taught(served)
    assert_cold(served, served.ask(prompt, max_tokens=8), expected)
    assert served.offered >= len(DOCUMENT)


def test_neighbours_of_a_plan_are_answered_as_alone(engine, models, built, kv):
    served = engine(None if kv else WHOLE[0], None if kv else WHOLE[1], model=models(), **kv)
    expected = served.cold(NEW, MOVED, LONG)
    beside = {"new": expected[0].tokens, "moved": expected[1].tokens}
    if kv:  # beside other rows sums of another order end at the next number of e4m3, in vLLM itself too
        beside = while_another_decodes(served)
        served = engine(*WHOLE, model=models(), **kv)
    taught(served)
    found = served.ask(NEW, MOVED, LONG, max_tokens=8)
    assert served.offered_of(3)[1] >= len(DOCUMENT)
    for answer, alone in zip(found, expected, strict=True):
        assert_cold(served, answer, alone)
    taught(served.renew())
    built.clear()
    found = while_another_decodes(served)
    assert [found[name][:TOKENS] for name in beside] == [each[:TOKENS] for each in beside.values()]
    # A card's backend may count the plan's rows as a decode's.
    assert (1, 1) in built or (ON_CARD and any(sum(each) == 2 for each in built))


@pytest.mark.promise("engines", "In vLLM latent rows in e4m3...")
def test_runs_of_every_length_give_the_engines_own_rows(engine, models, many_runs, built, kv, monkeypatch):
    """In the self-check, whose plans are over the engine's own KV; rows of e4m3 are read as they are stored."""
    if kv and not ON_CARD:
        monkeypatch.setattr(self_check, "_ROUNDED_BOUND", 5e-3)
    threshold = attrgetter("_parts.builder.reorder_batch_threshold")
    thresholds = watched(monkeypatch, attention.VllmRows, "_metadata", lambda _, rows, *__: threshold(rows))
    served = proven(engine, models(), **kv)
    assert served.runtime.mode.value == "wrapper"
    assert max(sum(each) if ON_CARD and not kv else each[1] for each in built) > 15
    # As prompts too: FLASH_ATTN_MLA takes those of the check for decodes.
    assert set(thresholds) == {served.worker._forward._parts.builder.reorder_batch_threshold, 0} > {0}
    if kv:
        monkeypatch.setattr(planned_forward, "own_rows_as_stored", None)
        refused = proven(engine, models(), **kv)
        assert (refused.refusal, refused.faults) == ("self_check", {"self_check": 1})


@pytest.mark.promise("engines", "In vLLM latent rows in e4m3...")
def test_more_runs_than_a_backend_has_room_for_decodes_are_all_prompts(
    engine, models, many_runs, built, monkeypatch, kv
):
    if not ON_CARD:
        monkeypatch.setattr(attention, "RESERVING_BACKENDS", ("CPU_MLA",))
    with on_card(LATENT_IN_FP8):
        served = proven(engine, models(), max_num_seqs=4, **kv)
    assert served.runtime.mode.value == "wrapper"
    assert max(map(sum, built)) > 15
    assert all(decodes == 0 for decodes, prompts in built if decodes + prompts > 4)
    own = served.worker._forward._parts.builder
    assert (own.vllm_config.scheduler_config.max_num_seqs, own.reorder_batch_threshold) == (4, 1)


@pytest.mark.promise("engines", "Plans over latent attention come out...")
@pytest.mark.promise("engines", "In vLLM latent rows in e4m3...")
def test_moved_rows_are_those_of_the_text_at_its_new_place(engine, models, blocks, kv, tmp_path):
    """In the lowest layer, where they depend on token and position alone; and their deviation in the next is found."""
    own = range(70, 70 + len(DOCUMENT))
    served = engine("exact", model=models(), **kv)
    served.ask(MOVED, max_tokens=1)
    fresh = stored(served, blocks, own)
    served.ask(DONOR, max_tokens=1)
    served = proven(engine, models(), **kv)
    before = stored(served, blocks, range(20, 20 + len(DOCUMENT)))
    taught(served)
    assert served.ask(MOVED, max_tokens=1).cached >= len(DOCUMENT)
    assert served.scheduler.outcomes.of(served.last).reused_tokens == len(DOCUMENT)
    moved = stored(served, blocks, own)
    free = [each[..., :FREE].float() for each in (moved, before, fresh)]
    turned, wanted, unturned = (each[0, :, FREE:].float() for each in (moved, fresh, before))
    assert torch.equal(free[0], free[1])
    if kv:  # what turns is rounded once more, to the nearest of eight between powers of 2
        assert float((free[0][0] == free[2][0]).float().mean()) >= (0.98 if ON_CARD else 1.0)
        assert 2**-5 < float((turned - wanted).norm() / wanted.norm()) < 2**-3
        assert float((unturned - wanted).norm() / wanted.norm()) > 2**-2
    else:
        torch.testing.assert_close(moved[0], fresh[0], rtol=1e-4, atol=5e-2 if ON_CARD else 1e-3)
        assert float((turned - unturned).abs().max()) > 1.0
    # The check compares whole rows of the layer above.
    deviations = (fresh[1].float() - moved[1].float()).norm(dim=1) / moved[1].float().norm(dim=1)
    for threshold in [float(deviations.median())] if kv else [0.2, 0.9]:
        settings = checked_at(served, tmp_path, layer=1, threshold=threshold)
        served = taught(engine("boundary", settings, model=models(), **kv))
        served.ask(MOVED, max_tokens=1)
        found, kept = served.scheduler.outcomes.of(served.last), deviations[deviations <= threshold]
        largest = pytest.approx(float(kept.max()), rel=1e-2 if kv else 1e-3, abs=5e-2 if ON_CARD else 1e-12)
        assert found.figures["largest_kept"] == largest
        # A token may lie at the threshold.
        assert found.reused_tokens == pytest.approx(len(kept), abs=2 if ON_CARD or kv else 0)
        assert found.checked_tokens == len(DOCUMENT)


@in_own_dtype
def test_another_way_to_compute_prompts_is_refused_by_name(engine, models, monkeypatch):
    monkeypatch.setattr(attention, "PREFILL_BACKENDS", ("ANOTHER",))
    served = proven(engine, models())
    answer = served.ask(MOVED, max_tokens=8)
    assert (answer, served.refusal) == (served.cold(MOVED), "attention_backend")
    assert not answer.cached


@pytest.mark.promise("engines", "In vLLM latent rows in e4m3...")
@pytest.mark.parametrize("kv", [FP8], ids=["fp8"], indirect=True)
@pytest.mark.parametrize(
    ("scale", "is_other", "reason", "told"),
    [
        (0.0, False, "kv_scales", "k_scale of 0.0"),
        (math.inf, False, "kv_scales", "k_scale of inf"),
        (0.02, True, "kv_cache_dtype", "e4m3fnuz"),
    ],
)
def test_a_scale_that_is_none_and_another_fp8_than_e4m3fn_are_refused_by_name(
    engine, models, kv, scale, is_other, reason, told, monkeypatch, caplog
):
    from vllm.platforms import current_platform

    monkeypatch.setitem(SCALES, 1, (scale,))
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", lambda *_: is_other)
    assert engine("position_fix", model=models(), **kv).refusal == reason
    assert told in caplog.text
