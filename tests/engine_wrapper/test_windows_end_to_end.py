"""gpt-oss in the embedded engine: documents many windows long, in layers with a window, without one, and with sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.reuse_profile import ProfileCheck
from tests.engine_wrapper.embedded.conftest import forget_prefixes
from tests.engine_wrapper.serving import (
    BLOCK,
    DOCUMENT,
    DONOR,
    GREEDY,
    QUESTION,
    SHIFTED,
    Engines,
    assert_same,
    serve,
    teach,
    text,
)
from tests.random_models import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine_wrapper.embedded.llm import LLM, RequestOutput

Shifted = Callable[..., tuple["LLM", "RequestOutput"]]
Profile = Callable[..., "Path"]

# The layer in the middle has full attention.
LAYERS = 3
V2 = {"use_kv_cache_manager_v2": True}


@pytest.fixture(scope="module")
def runner(tiny_model_paths: dict[str, Path]) -> ModelRunner:
    return ModelRunner(tiny_model_paths["gpt_oss"], "float32", "cpu")


@pytest.fixture
def engine(tiny_model_paths: dict[str, Path], runner: ModelRunner, tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path / "audit.jsonl", model=tiny_model_paths["gpt_oss"], runner=runner)
    yield engines
    engines.shutdown()


def test_the_document_is_many_windows_long() -> None:
    assert len(DOCUMENT) > 5 * WINDOW


@pytest.mark.parametrize("check", [{}, {"sample_every": 8}], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_num_tokens": 64}, {"cache": V2}], ids=str)
def test_what_a_check_finds_to_deviate_is_computed(
    engine: Engines, profile: Profile, check: dict[str, Any], options: dict[str, Any]
) -> None:
    """A random model's KV deviates wherever its context changes."""
    path = profile(check=ProfileCheck(layer=LAYERS - 1, threshold=0.0, **check))
    llm = engine(PROFILE=path, **options)
    teach(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert output.reused_tokens == 0
    assert llm.connector_scheduler.reuse_of(output.request_id).recomputed_tokens == len(DOCUMENT)
    assert_same(output, serve(engine.cold(), SHIFTED))


def test_the_kernels_answer_as_torch_does(engine: Engines, interpret: Callable[[], None]) -> None:
    prompt = text(9, WINDOW + 20)
    expected = serve(engine.cold(), prompt)
    interpret()
    assert_same(serve(engine.cold(), prompt), expected)


def test_all_layers_computed_again_are_a_cold_run_with_holes_and_another_request(engine: Engines) -> None:
    first, second = DOCUMENT[:100], DOCUMENT[100:]
    prompts = [SHIFTED, text(5, 50) + first + text(6, WINDOW // 2) + second + text(7, 20), text(8, 150)]
    llm = engine(POLICY="boundary", RECOMPUTE_BOUNDARY_LAYER=LAYERS)
    teach(llm, DONOR, first, second)
    cold = engine.cold()
    for output, prompt in zip(llm.generate(prompts, [GREEDY] * 3), prompts, strict=True):
        assert_same(output, serve(cold, prompt))


def test_layers_of_all_kinds_share_one_group_of_tensorrt_llms_v2_that_keeps_all_tokens(engine: Engines) -> None:
    """As with `max_attention_window: [max_seq_len]`: what the stock connector keeps is read in every layer."""
    llm = engine("semblend_trt.connector", V2, contract="main", POLICY="exact")
    teach(llm, DONOR)
    forget_prefixes(llm)
    output = serve(llm, DONOR + QUESTION)
    assert output.reused_tokens >= len(DONOR) // BLOCK * BLOCK
    assert_same(output, serve(engine.cold(), DONOR + QUESTION))


def test_a_check_that_sees_no_further_than_a_window_is_refused_by_name(shifted: Shifted, profile: Profile) -> None:
    _, output = shifted(PROFILE=profile(check=ProfileCheck(layer=1, threshold=1.0)))
    assert (output.reused_tokens, output.reuse_reason) == (0, "profile_check_layer")


def test_a_policy_whose_check_sees_no_further_is_refused(shifted: Shifted) -> None:
    _, output = shifted(POLICY="cacheblend")
    assert (output.reused_tokens, output.reuse_reason) == (0, "configuration")


def test_blocks_longer_than_the_window_are_refused_by_name(engine: Engines) -> None:
    llm = engine(cache={"tokens_per_block": 2 * WINDOW}, POLICY="position_fix")
    teach(llm, DONOR)
    assert serve(llm, SHIFTED).reuse_reason == "window_below_block"
