"""KV in e4m3 in the embedded engine: attention reads what is stored, checks compare it, and donors are its bytes."""

import pytest
import torch

from engine_wrapper.embedded.llm import KvCacheConfig
from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.request import SamplingParams
from kernels.layout import pool_view
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import SpanCheck
from semblend_trt.reuse_profile import ReuseProfile
from tests.builders import engine as serving
from tests.builders.engine import DOCUMENT, DONOR, SHIFTED, assert_same, geometry_of, serve, serve_and_drain, teach
from tests.engine_wrapper.forward_bench import NUM_LAYERS, Bench, load, tokens_of
from tests.engine_wrapper.test_attention_end_to_end import SHORT
from tests.engine_wrapper.test_disk_tier_end_to_end import donor_files, ready
from tests.kernels.builders import FP8, error_of
from tests.random_models import FAMILIES
from validation.models import PROFILE_NAME, shipped_model

BOUNDARY = {"POLICY": "boundary", "RECOMPUTE_BOUNDARY_LAYER": NUM_LAYERS}
# K and V of heads, and latent rows, of whose channels the last ones turn.
FORMS, LATENT_CHANNELS = ("qwen2", "deepseek_v3"), 512
# Half a unit in the last of three bits of mantissa, for the donor's rounding and for that of the moved key.
TWO_ROUNDINGS = 2 * 2**-4
PLACES = range(len(serving.OTHER_INSTRUCTION), len(serving.OTHER_INSTRUCTION) + len(DOCUMENT))


class Fp8Engines(serving.Engines):
    """Engines whose pool is in fp8, unless `cache` names another dtype."""

    def __call__(self, module="engine_wrapper.connector", cache=None, **options):
        return super().__call__(module, {"dtype": "fp8", **(cache or {})}, **options)


@pytest.fixture(params=FORMS)
def engine(request, tiny_model_paths, engines_of):
    path = tiny_model_paths[request.param]
    return engines_of(path, Fp8Engines, runner=ModelRunner(path, "float32", "cpu"))


every_family = pytest.mark.parametrize("engine", FAMILIES, indirect=True)


@pytest.mark.promise(
    "engines",
    "In the embedded engine KV in e4m3 is read as it is stored: with all layers computed again answers are those of "
    "a run without a plan to the bit, a moved run is rounded once more, and a token that is the same does not "
    "deviate; latent rows too",
)
@every_family
def test_all_layers_computed_again_are_a_run_without_a_plan_bit_for_bit(engine):
    llm, cold = engine(**BOUNDARY, **SHORT), engine.cold()
    assert llm.executor.pool.dtype == cold.executor.pool.dtype == FP8
    outputs, expected = ([serve(each, prompt) for prompt in (DONOR, SHIFTED)] for each in (llm, cold))
    assert llm.connector_scheduler.reuse_of(outputs[1].request_id).offered_tokens > 100
    for output, wanted in zip(outputs, expected, strict=True):
        assert_same(output, wanted, tolerance=0.0)


def held_while_served(llm, prompt, positions):
    """KV at these positions of a prompt behind its prefill, [layers, kv_factor, kv_heads, positions, head_dim]."""
    stream = llm.generate_async(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    next(stream)
    blocks = llm.block_manager.block_ids(stream.request_id)
    kv = pool_view(llm.executor.pool, geometry_of(llm))[blocks].float().permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    stream.close()
    return kv[:, :, :, positions.start : positions.stop]


@pytest.mark.promise("engines", "In the embedded engine KV in...")
@every_family
def test_a_moved_run_is_the_same_text_at_its_new_place_but_for_rounding(engine):
    """In the lowest layer, where a token's KV depends on nothing but itself and its place."""
    llm = engine(POLICY="position_fix", **SHORT)
    teach(llm, DONOR)
    moved, computed = (held_while_served(each, SHIFTED, PLACES)[0] for each in (llm, engine.cold()))
    there = range(len(serving.INSTRUCTION), len(serving.INSTRUCTION) + len(DOCUMENT))
    unmoved = held_while_served(engine.cold(), DONOR, there)[0]
    (keys, still), (expected, same), (other, _) = map(by_place, (moved, computed, unmoved))
    assert torch.equal(still, same)
    assert 0.1 * TWO_ROUNDINGS < error_of(keys, expected) < TWO_ROUNDINGS
    assert error_of(other, expected) > 2 * TWO_ROUNDINGS


def by_place(kv):
    """What depends on a token's place in a layer's KV, [kv_factor, kv_heads, tokens, head_dim], and what does not."""
    return (kv[0], kv[1]) if len(kv) == 2 else (kv[0, ..., LATENT_CHANNELS:], kv[0, ..., :LATENT_CHANNELS])


@pytest.mark.promise("engines", "In the embedded engine KV in...")
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("every", [0, 4], ids=["dense", "sampled"])
def test_a_token_that_is_the_same_deviates_by_nothing(tiny_model_paths, make_plan, family, layer, every):
    """Fresh rows are compared as they would be stored: threshold 0 keeps every one of them."""
    bench = Bench(load(tiny_model_paths[family]), kv_dtype=FP8)
    tokens = tokens_of(60)
    logits, kv = bench.cold(tokens)
    bench.place(1, kv, (5, 45))
    check = SpanCheck(layer, 0.0, sample_every=every)
    output = bench.run(bench.planned(make_plan(tokens, [(5, 20), (20, 45)], check=check)))[0]
    (evidence,) = bench.evidence
    assert (evidence.largest_kept, evidence.is_dropped, evidence.recomputed_tokens) == (0.0, False, 0)
    assert error_of(output, logits[45:]) < 1e-5
    assert torch.equal(bench.kv(1, 60).view(torch.uint8), kv[:, :, :, :60].contiguous().view(torch.uint8))


GROUPS = 2


def answers(llm, cases):
    """Prompts that are answered rightly and with the donor's answer, and tokens that were reused, behind the donors.

    A receipt says what was checked: all that is offered under `verified`, nothing under another policy."""
    for case in cases:
        teach(llm, *case.donors)
    found = [serve(llm, case.prompt, SamplingParams(max_tokens=12)) for case in cases]
    told = [each.outputs[0].text.strip() for each in found]
    right = sum(each == case.reference for each, case in zip(told, cases, strict=True))
    wrong = sum(each == case.donor_answer for each, case in zip(told, cases, strict=True))
    for receipt in (each.receipt for each in found if each.receipt is not None and each.receipt["offered_tokens"]):
        is_checked = receipt["checked_tokens"] + receipt["sampled_tokens"] > 0
        assert is_checked == (receipt["policy"] == "verified") == (receipt["profile"] is not None)
    return right, wrong, sum(each.reused_tokens for each in found)


@pytest.fixture
def shipped(shipped_runner, engines_of):
    return engines_of(str(shipped_model()), Fp8Engines, runner=shipped_runner)


def rebound(engines, path, **changes):
    """Writes the shipped model's profile, as if it had been made for KV in fp8, with changes to its check."""
    found, namespace = ReuseProfile.read(shipped_model() / PROFILE_NAME), engines().connector_scheduler.namespace
    own = {"kv_dtype": namespace.kv_dtype, "cache_dtype": namespace.cache_dtype}
    fields = {"namespace": {**found.namespace, **own}, "check": found.check.model_copy(update=changes)}
    found.model_copy(update=fields).write(path)
    return path


SAMPLE = {"sample_every": 4, "sample_threshold": 0.1}


@pytest.mark.promise("policies", "Receipts tell checked reuse from unchecked on prompts that are made to break reuse")
@pytest.mark.promise(
    "engines",
    "In the embedded engine traps are seen by verified with KV in e4m3 too; its donors and profiles serve no other "
    "KV type, and other types are refused by name",
)
@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("family", ["header_trap", "mid_sentence_trap"])
def test_a_trap_is_seen_by_verified_and_not_by_position_fix(shipped, tmp_path, family):
    cold = shipped.cold()
    cases = serving.cases_of(cold.tokenizer, family, GROUPS)
    assert answers(cold, cases)[0] == GROUPS
    assert answers(shipped(POLICY="position_fix"), cases)[:2] == (0, GROUPS)
    for changes in ({}, SAMPLE):
        assert answers(shipped(PROFILE=rebound(shipped, tmp_path / "fp8.json", **changes)), cases)[:2] == (GROUPS, 0)


@pytest.mark.promise(
    "engines",
    "In the embedded engine donors of a cache in e4m3 answer alike from every tier and take the cache's bytes of "
    "each budget",
)
@pytest.mark.parametrize("way", [{"DEVICE_BYTES": 1 << 24}, {"contract": "1.2"}], ids=["device", "snapshot"])
def test_a_donor_on_the_host_and_one_that_went_another_way_are_the_same_bytes(shifted, way):
    outputs = []
    for options in ({}, way):
        llm, output = shifted(POLICY="position_fix", **{"DEVICE_BYTES": 0, **options})
        outputs.append(output)
        assert outputs[-1].reused_tokens == len(DOCUMENT)
        used = llm.connector_scheduler.donor_index.catalog.stats().device_bytes
        assert bool(used) == bool(options.get("DEVICE_BYTES"))
        assert (llm.connector_worker.saver._snapshots is None) == ("contract" not in options)
    assert_same(*outputs, tolerance=0.0)


@pytest.mark.promise("engines", "In the embedded engine donors of...")
def test_donors_take_the_caches_bytes_of_each_budget(engine):
    token = geometry_of(engine(None)).bytes_per_token(FP8)
    budget = 300 * token
    llm = engine(POLICY="position_fix", HOST_BYTES=budget, DEVICE_BYTES=0)
    teach(llm, DONOR)
    stats = llm.connector_scheduler.donor_index.catalog.stats()
    assert (stats.ready, stats.host_bytes) == (1, token * len(DONOR))
    assert serve(llm, SHIFTED).reused_tokens == len(DOCUMENT)
    llm = engine(DEVICE_BYTES=budget)
    blocks = len(llm.connector_worker.store.device._arena)
    assert blocks == llm.connector_scheduler.donor_index.catalog.capacities.device_blocks == 300 // serving.BLOCK


@pytest.mark.promise("engines", "In the embedded engine traps are...")
def test_a_donor_on_disk_serves_another_engine_of_its_dtype_and_no_other(engine, tmp_path):
    settings = {"POLICY": "position_fix", "HOST_BYTES": 1 << 30, "DEVICE_BYTES": 0, **serving.disk_tier(tmp_path)}
    first = ready(engine(MIN_DONOR_TOKENS=100, **settings))
    serve_and_drain(first, DONOR)
    expected = serve_and_drain(first, SHIFTED)
    assert expected.reused_tokens == len(DOCUMENT)
    first.shutdown()
    assert len(donor_files(tmp_path)) == 1
    late = settings | {"MIN_DONOR_TOKENS": 4096}
    again = ready(engine(**late))
    assert serve_and_drain(again, SHIFTED).reuse_reason == "donor_on_disk"
    serving.evict_prefixes(again)
    output = serve_and_drain(again, SHIFTED)
    assert output.reused_tokens == len(DOCUMENT)
    assert_same(output, expected, tolerance=0.0)
    again.shutdown()
    other = ready(engine(cache={"dtype": "auto"}, **late))
    assert serve_and_drain(other, SHIFTED).reuse_reason == "no_donor_match"
    other.shutdown()
    assert not donor_files(tmp_path)


@pytest.mark.promise("engines", "In the embedded engine traps are...")
@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_e4m3", "nvfp4", "int8", "FP8", ""])
def test_other_dtypes_are_refused_with_their_value(dtype):
    with pytest.raises(ConfigurationError, match=rf"KvCacheConfig\.dtype: .*'fp8' \(given: '{dtype}'\)"):
        KvCacheConfig(dtype=dtype)
