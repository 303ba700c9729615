"""Layers that vLLM calls otherwise than Llama's, and those of Transformers: answers are those of a cold run."""

from __future__ import annotations

from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm.decoder import layer_calls_of
from tests.conftest import save_tiny_model
from tests.engine_wrapper.vllm.conftest import DOCUMENT, MOVED, Answered, Served, cold_answers, near, taught

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Heads as wide as vLLM's attention on a CPU needs them, and room for the prompts.
SIZES = {"hidden_size": 128, "vocab_size": 2000, "max_position_embeddings": 2048}
LAYERS = 3
# vLLM 0.28 runs OLMo-2 by the layers of Transformers, older versions by their own; SmolLM3 has none of vLLM's.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("granite", {}),
    ("olmo2", {}),
    ("smollm3", {}),
    ("qwen3", {"model_impl": "transformers"}),
    ("granite", {"enforce_eager": False}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """By family and layers, all before an engine runs: vLLM changes the classes of Transformers that it uses."""
    found = {}
    for family, layers in product(("granite", "olmo2", "qwen3", "smollm3"), (1, LAYERS)):
        # SmolLM3's lowest layer has no RoPE.
        own = {"qwen3": {"head_dim": 32}, "smollm3": {"no_rope_layers": [0, 1, 0][:layers]}}.get(family, {})
        folder = tmp_path_factory.mktemp(family)
        found[family, layers] = save_tiny_model(family, folder, num_hidden_layers=layers, **own, **SIZES)
    return found


@pytest.fixture(scope="module")
def cold(models: dict[tuple[str, int], Path]) -> Callable[..., Answered]:
    """The answer of vLLM without a connector."""
    return cache(lambda family, layers: cold_answers(MOVED, model=models[family, layers])(MOVED))


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize(
    ("policy", "layers"), [("boundary", LAYERS), ("position_fix", 1)], ids=["all layers again", "one layer is all"]
)
def test_answers_behind_a_moved_run_are_cold_ones(
    engine: Callable[..., Served],
    models: Any,
    cold: Any,
    family: str,
    options: dict[str, Any],
    policy: str,
    layers: int,
) -> None:
    """K and V of the lowest layer depend on token and position only. The self-check has run checks of both kinds."""
    wanted = cold(family, layers)
    own = {"recompute_boundary_layer": LAYERS} if policy == "boundary" else {}
    served = taught(engine(policy, own, model=models[family, layers], **options))
    answer = served.ask(MOVED, max_tokens=16)
    assert served.offered >= len(DOCUMENT)
    assert answer.tokens == wanted.tokens
    assert near(answer.logprobs, wanted.logprobs)
    assert served.worker._forward._sparse
    assert not served.runtime.faults


def other(hidden_states: Any, positions: Any, cache: Any) -> None: ...


@pytest.mark.parametrize("forward", [other, lambda hidden_states, position_embeddings: None, lambda *rows: None])
def test_layers_that_take_something_else_are_refused_by_name(forward: Any) -> None:
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(forward=forward)]))
    with pytest.raises(LayoutError, match="not known here") as refusal:
        layer_calls_of(model)
    assert refusal.value.reason == "layer_call"


def test_layers_are_called_by_the_names_that_they_give() -> None:
    class Layer:
        def forward(self, hidden_states: int, positions: int, residual: int, scale: int = 7) -> tuple[int, int]:
            return 100 * positions + 10 * hidden_states + residual, scale

        __call__ = forward

    calls = layer_calls_of(SimpleNamespace(model=SimpleNamespace(layers=[Layer()])))
    assert calls.run(0, 1, (2, 3)) == (123, 7)  # type: ignore[arg-type]
