"""Deviations of the shipped model, small where only the place changed, and what each share does to its answers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import SemBlendError
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.random_models import CHUNK, WINDOW, random_model
from validation.calibration.deviations import DeviationCollector, missed, write_plants
from validation.calibration.prepared import Observer, check_profile_was_tried, identity_of
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import ServingSettings
from validation.models import PROFILE_NAME, shipped_model

FP8 = torch.float8_e4m3fn


def collected(shipped, family, kv_dtype=None):
    cases = write_cases(shipped, FamilyRequest((family,), groups=2, questions=2, tokens=640))
    collector = DeviationCollector(shipped.runner.model, shipped, 64, kv_dtype)
    return [found for found in collector.collect(cases) if found is not None]


def test_every_layer_of_each_groups_first_prompt_is_compared(shipped):
    found = collected(shipped, "reordered")
    assert len(found) == 2
    for prompt in found:
        assert prompt.values.shape == (8, sum(prompt.lengths))
        assert prompt.exact_tokens + sum(prompt.lengths) <= prompt.promised < 640
        # The lowest layer sees the token alone: only the rotation's rounding is left.
        assert prompt.values[0].max() < 1e-4


def test_fp8_adds_the_rounding_of_what_is_stored_and_moved(shipped):
    """A half of 2^-3 at most for each of three roundings, to the nearest of 8 steps between powers of 2."""
    for prompt, own in zip(collected(shipped, "reordered", FP8), collected(shipped, "reordered"), strict=True):
        assert (prompt.lengths, prompt.values.shape) == (own.lengths, own.values.shape)
        assert 0.01 < prompt.values[0].min() <= prompt.values[0].max() < 3 * 2**-4
        # It shows in tokens that hardly deviate, and is little beside what another place does.
        assert own.values[2].min() < 0.02 < prompt.values[2].min()
        assert 1 < np.median(prompt.values[2]) / np.median(own.values[2]) < 1.5


@pytest.mark.parametrize(("family", "seen"), [("gpt_oss", WINDOW), ("gemma3_text", WINDOW), ("llama4_text", CHUNK)])
def test_layers_with_a_window_or_chunks_keep_the_kv_of_all_tokens(tmp_path, family, seen):
    model = random_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    facts = model_facts(tmp_path)
    tokens = torch.randint(0, 256, (seen * 3,), generator=torch.Generator().manual_seed(4))
    blocks = DeviationCollector(model, SimpleNamespace(facts=facts), min_span=64)._computed(tokens.tolist()).pool
    # [layers, kv_factor, kv_heads, tokens, head_dim]
    kv = blocks.unflatten(3, (facts.kv_heads, 32, -1)).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    own = model(tokens[None], use_cache=True).past_key_values.layers
    for layer, cache in enumerate(own):
        kept = cache.keys.shape[2]
        assert kept == (seen - 1 if layer != 1 else len(tokens))
        torch.testing.assert_close(kv[layer, 0, :, -kept:], cache.keys[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(kv[layer, 1, :, -kept:], cache.values[0], rtol=0, atol=1e-5)


def test_nothing_is_found_where_nothing_is_shared(shipped):
    assert collected(shipped, "unrelated") == []


def with_check(profile, **fields):
    return profile.model_copy(update={"check": profile.check.model_copy(update=fields)})


def test_the_planter_takes_those_of_which_most_is_kept(shipped):
    profile = ReuseProfile.read(shipped_model() / PROFILE_NAME)
    collector = DeviationCollector(shipped.runner.model, shipped, min_span=48)
    plants = write_plants(shipped, FamilyRequest(("header_trap",), groups=5, seed=3))
    half = with_check(profile, threshold=0.8, window_threshold=None)
    chosen = collector.hardest(plants, half, 5)
    found = collector.collect(chosen)
    sums = missed(found, half)
    assert sums == sorted(sums, reverse=True)
    assert sums[0] > 0
    assert chosen[:3] == collector.hardest(plants, half, 3)
    kept = found[0].kept_and_compared(half.terms.check, half.head_tokens)[0]
    assert sums[0] == pytest.approx(found[0].values[half.check.layer :, kept].astype(np.float64).sum())
    # What a policy computes whole is not missed.
    exact = profile.model_copy(update={"policy": "exact", "check": None, "head_tokens": 0})
    assert missed(found[:1], with_check(profile, threshold=0.0)) == missed(found[:1], exact) == [0.0]
    blind = with_check(profile, threshold=1.0, max_span_share=1.0, window_threshold=None)
    assert missed(found[:1], blind)[0] > 0.0


SETTINGS = ServingSettings(str(shipped_model()), max_tokens=8, batch=8)


@pytest.fixture(scope="module")
def cases(shipped):
    names = ("header_trap", "repeat")
    return write_cases(shipped, FamilyRequest(names, groups=3, questions=1, tokens=512, seed=5))


def test_each_share_is_observed_of_prompts_that_move_text(shipped, cases):
    check = ProfileCheck(layer=2, threshold=1.0, sample_every=16, sample_threshold=1.0)
    profile = ReuseProfile.made_for(*identity_of(shipped, SETTINGS), policy="verified", check=check)
    observed = Observer(shipped, cases, SETTINGS).observations(profile, cases, (0.0, 0.9), "t")
    # What repeats a donor is exact: no check compares it.
    assert [each.family for each in observed] == ["header_trap"] * 3
    assert len({each.group for each in observed}) == 3
    for each in observed:
        unchecked, most = each.kl
        assert unchecked > 0.1
        assert most < 0.5 * unchecked
        assert 0.0 < each.deviation < 1.0


def test_cold_runs_differ_by_rounding(shipped, cases):
    found = Observer(shipped, cases, SETTINGS).rounding(cases[:2])
    assert len(found) == 6
    # The other type rounds most.
    assert max(found[:4]) < min(found[4:]) < max(found) < 1e-5


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("profile_mismatch", "does not take the profile"),
        ("check_needs_wrapper", "executes no plans"),
        ("self_check", "executes no plans"),
        ("attention_backend", "executes no plans"),
    ],
)
def test_an_engine_that_cannot_serve_a_candidate_ends_the_trial(make_sample, reason, told):
    with pytest.raises(SemBlendError, match=told):
        check_profile_was_tried([make_sample(), make_sample(reason=reason)])
    check_profile_was_tried([make_sample(reason=each) for each in (None, "deviation", "risk_above_bound")])
