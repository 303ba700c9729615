"""DeepSeek-V3 in the embedded engine: a pool of latent rows, from which plans come out as a cold run's answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.pool import cache_layout
from semblend_trt.errors import ConfigurationError
from semblend_trt.reuse_profile import ProfileCheck
from tests.engine_wrapper.embedded.conftest import forget_prefixes
from tests.engine_wrapper.serving import DOCUMENT, DONOR, GREEDY, SHIFTED, Engines, assert_same, serve, teach, text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Profile = Callable[..., "Path"]

LAYERS = 3


@pytest.fixture(scope="module")
def runner(tiny_model_paths: dict[str, Path]) -> ModelRunner:
    return ModelRunner(tiny_model_paths["deepseek_v3"], "float32", "cpu")


@pytest.fixture
def engine(tiny_model_paths: dict[str, Path], runner: ModelRunner, tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path / "audit.jsonl", model=tiny_model_paths["deepseek_v3"], runner=runner)
    yield engines
    engines.shutdown()


@pytest.mark.parametrize("version", ["embedded", "main"])
def test_text_from_position_0_is_reused_and_a_token_takes_one_row(engine: Engines, version: str) -> None:
    cache = {"use_kv_cache_manager_v2": version == "main"}
    llm = engine(cache=cache, POLICY="exact", contract=version)
    assert llm.executor.pool.tensor.shape[2:] == (1, 16 * (512 + 64))
    teach(llm, DONOR)
    forget_prefixes(llm)
    prompt = DONOR[:180] + text(21, 30)
    output = serve(llm, prompt)
    assert output.reused_tokens == 180
    assert_same(output, serve(engine.cold(), prompt))


@pytest.mark.parametrize("check", [{}, {"sample_every": 8}], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_num_tokens": 64}], ids=str)
def test_what_a_check_finds_to_deviate_is_computed(
    engine: Engines, profile: Profile, check: dict[str, Any], options: dict[str, Any]
) -> None:
    """A random model's rows deviate wherever their context changes."""
    llm = engine(PROFILE=profile(check=ProfileCheck(layer=1, threshold=0.0, **check)), **options)
    teach(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert output.reused_tokens == 0
    assert llm.connector_scheduler.reuse_of(output.request_id).recomputed_tokens == len(DOCUMENT)
    assert_same(output, serve(engine.cold(), SHIFTED))


def test_all_layers_computed_again_are_a_cold_run_with_holes_and_another_request(engine: Engines) -> None:
    first, second = DOCUMENT[:100], DOCUMENT[100:]
    prompts = [SHIFTED, text(5, 50) + first + text(6, 16) + second + text(7, 20), text(8, 150)]
    llm = engine(POLICY="boundary", RECOMPUTE_BOUNDARY_LAYER=LAYERS)
    teach(llm, DONOR, first, second)
    cold = engine.cold()
    for output, prompt in zip(llm.generate(prompts, [GREEDY] * 3), prompts, strict=True):
        assert_same(output, serve(cold, prompt))


def test_the_layout_of_its_pool_has_no_values(runner: ModelRunner, engine: Engines) -> None:
    (group,) = cache_layout(engine.cold().executor.pool.tensor, 16).groups
    (region,) = group.regions
    assert [(each.layer_id, each.role) for each in region.buffers] == [(layer, "key") for layer in range(LAYERS)]


def test_transformers_that_caches_every_head_is_refused_when_the_model_is_loaded(
    tiny_model_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    with pytest.raises(ConfigurationError, match="caches K and V of every head"):
        ModelRunner(tiny_model_paths["deepseek_v3"], "float32", "cpu")
