"""Gemma 3 inside vLLM: most layers have a window and a rotation of their own, some neither."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.embedded.sampling import SamplingParams
from tests.conftest import save_tiny_model, save_with_images
from tests.engine_wrapper.vllm.conftest import (
    DOCUMENT,
    MOVED,
    Answered,
    Served,
    cold_answers,
    near,
    needs_torchvision,
    taught,
)
from validation.arms import COLD, ArmChoices, arms_of
from validation.engines import EngineSettings
from validation.vllm_engine import VllmEngines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("blocks_for_windows")

WINDOW, LAYERS = 64, 3
# Heads as wide as vLLM's attention on a CPU needs them, and room for the prompts.
SIZES = {"head_dim": 32, "vocab_size": 2000, "max_position_embeddings": 2048, "sliding_window": WINDOW}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def model(layers: int) -> Path:
        folder = tmp_path_factory.mktemp("gemma")
        return save_tiny_model("gemma3_text", folder, num_hidden_layers=layers, **SIZES)

    return model


@pytest.fixture(scope="module")
def with_images(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as part of one that takes images too, as Gemma 3 is published."""
    return save_with_images(models(LAYERS), tmp_path_factory.mktemp("with-images"))


@pytest.fixture(scope="module")
def cold(models: Callable[..., Path]) -> Callable[..., Answered]:
    """The answer of vLLM without a connector."""
    return cache(lambda layers: cold_answers(MOVED, model=models(layers))(MOVED))


@pytest.mark.parametrize(
    ("policy", "settings", "layers", "options"),
    [
        ("boundary", {"recompute_boundary_layer": LAYERS}, LAYERS, {}),
        ("boundary", {"recompute_boundary_layer": LAYERS}, LAYERS, {"enforce_eager": False}),
        # Behind a layer with a window K and V depend on the tokens within it.
        ("epic", {"epic_tokens": WINDOW - 1}, 2, {}),
    ],
    ids=str,
)
def test_answers_behind_a_moved_run_are_cold_ones(
    engine: Callable[..., Served],
    models: Any,
    cold: Any,
    policy: str,
    settings: dict[str, Any],
    layers: int,
    options: dict[str, Any],
) -> None:
    wanted = cold(layers)
    served = taught(engine(policy, settings, model=models(layers), **options))
    answer = served.ask(MOVED, max_tokens=16)
    assert served.offered >= len(DOCUMENT) - WINDOW
    assert answer.tokens == wanted.tokens
    assert near(answer.logprobs, wanted.logprobs)
    assert served.worker._forward._sparse
    assert not served.runtime.faults


@needs_torchvision
def test_a_model_that_takes_images_is_served_for_text_alone(
    engine: Callable[..., Served], with_images: Path, cold: Any
) -> None:
    wanted = cold(LAYERS)
    settings = {"recompute_boundary_layer": LAYERS}
    served = taught(engine("boundary", settings, model=with_images, language_model_only=True))
    answer = served.ask(MOVED, max_tokens=16)
    assert served.offered >= len(DOCUMENT)
    assert answer.tokens == wanted.tokens
    assert near(answer.logprobs, wanted.logprobs)
    assert not served.runtime.faults


@pytest.mark.parametrize("part", ["text", pytest.param("whole", marks=needs_torchvision)])
def test_validation_serves_it_without_a_connector_too(
    models: Any, part: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = models(LAYERS) if part == "text" else request.getfixturevalue("with_images")
    engines = VllmEngines(str(path), "float32")
    settings = EngineSettings(str(path), 4096, 1 << 24, 64, 4)
    (arm,) = arms_of([COLD], ArmChoices(engines.facts.num_layers, boundary=1))
    engine = engines.open(arm, settings, tmp_path / "cold.jsonl")
    try:
        (answer,) = engine.generate([DOCUMENT], SamplingParams(max_tokens=2, return_generation_logits=True))
    finally:
        engine.shutdown()
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([DOCUMENT])).logits
    first = answer.outputs[0].generation_logits[0]
    rounding = 1e-2 if torch.cuda.is_available() else 1e-3  # the plain forward runs on the CPU
    torch.testing.assert_close(first[: plain.shape[-1]], plain[0, -1].float(), rtol=rounding, atol=rounding)
