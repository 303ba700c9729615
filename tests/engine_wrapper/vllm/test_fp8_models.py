"""KV in e4m3 inside a real vLLM, of models with windows, sinks, chunks and experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MIXTURES, save_tiny_model
from tests.engine_wrapper.vllm.conftest import (
    DOCUMENT,
    MOVED,
    Answered,
    Served,
    cold_answers,
    near,
    random_tokens,
    taught,
)
from tests.engine_wrapper.vllm.place import exact

Engine = Callable[..., Served]
Models = Callable[..., Path]
Cold = Callable[..., Answered]

WINDOW, CHUNK, LAYERS = 64, 128, 3
FP8 = {"kv_cache_dtype": "fp8"}
pytestmark = pytest.mark.usefixtures("blocks_for_windows")

# Heads as wide as vLLM's attention on a CPU needs them, and room for the prompts.
SIZES: dict[str, Any] = {"head_dim": 32, "vocab_size": 2000, "max_position_embeddings": 2048}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": None}
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "llama4_text": {"attention_chunk_size": CHUNK},
}
# Where one layer is all, vLLM wants experts in a GLM.
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
# The document where the donor has it, behind other tokens: its K and V are not turned, and so not rounded again.
other = random_tokens(19)
IN_PLACE = [*other(20), *DOCUMENT, *other(40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def model(family: str, layers: int = LAYERS) -> Path:
        sizes = SIZES | OWN.get(family, {}) | (ONE_LAYER if layers == 1 else {"num_hidden_layers": layers})
        return save_tiny_model(family, tmp_path_factory.mktemp(family), **sizes)

    return model


@pytest.fixture(scope="module")
def cold(models: Models) -> Cold:
    """Answers of vLLM without a connector, with its own fp8 cache."""

    @cache
    def asked(family: str, layers: int) -> Cold:
        return cold_answers(MOVED, IN_PLACE, model=models(family, layers), **FP8)

    return lambda prompt, family, layers=LAYERS: asked(family, layers)(prompt)


def is_cold(served: Served, prompt: list[int], expected: Answered) -> bool:
    """Whether a prompt, most of whose document vLLM does not compute, is answered as by a cold run."""
    answer = served.ask(prompt, max_tokens=16)
    assert served.offered >= len(DOCUMENT) - (served.runtime.pool.chunk or WINDOW)
    assert not served.runtime.faults
    return answer.tokens == expected.tokens and near(answer.logprobs, expected.logprobs)


@pytest.mark.parametrize("family", [*MIXTURES, "gemma3_text", "llama4_text"])
def test_with_all_layers_computed_again_answers_are_cold_ones(
    engine: Engine, models: Models, cold: Cold, family: str
) -> None:
    expected = cold(MOVED, family)
    served = taught(engine("boundary", {"recompute_boundary_layer": LAYERS}, model=models(family), **FP8))
    assert is_cold(served, MOVED, expected)


@pytest.mark.parametrize("family", [each for each in MIXTURES if each != "gpt_oss"])
def test_a_run_that_keeps_its_place_is_that_of_a_cold_run_where_one_layer_is_all(
    engine: Engine, models: Models, cold: Cold, family: str
) -> None:
    """K and V of the lowest layer depend on token and position only."""
    expected = cold(IN_PLACE, family, 1)
    served = taught(engine("position_fix", model=models(family, 1), **FP8))
    assert is_cold(served, IN_PLACE, expected)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
@pytest.mark.parametrize(("heads", "cold_ones"), [(WINDOW - 1, True), pytest.param(WINDOW - 2, False, marks=exact)])
def test_a_window_reaches_as_far_into_a_run_that_keeps_its_place(
    engine: Engine, models: Models, cold: Cold, family: str, heads: int, cold_ones: bool
) -> None:
    """K and V above one layer with a window depend on the tokens within it."""
    expected = cold(IN_PLACE, family, 2)
    served = taught(engine("epic", {"epic_tokens": heads}, model=models(family, 2), **FP8))
    assert is_cold(served, IN_PLACE, expected) == cold_ones
