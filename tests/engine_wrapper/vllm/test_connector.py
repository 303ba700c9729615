"""What a user of vLLM gets: answers that equal vLLM's own, from other requests' KV."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine_wrapper.vllm.conftest import Served

pytestmark = pytest.mark.every_version

RANDOM = random.Random(0)


def some(count: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(count)]


DOCUMENT = some(600)
DONOR, SHIFTED, OTHER = [*some(40), *DOCUMENT, *some(30)], [*some(57), *DOCUMENT, *some(33)], some(200)


@pytest.fixture(scope="module")
def cold() -> dict[str, object]:
    """Answers of vLLM without a connector."""
    from tests.engine_wrapper.vllm.conftest import serving

    served = serving(enable_prefix_caching=False)
    try:
        return {name: served.ask(prompt) for name, prompt in (("donor", DONOR), ("shifted", SHIFTED), ("other", OTHER))}
    finally:
        served.close()


def near(ours: list[float], theirs: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-3


def test_without_a_plan_answers_are_vllms_own_to_the_bit(engine: Callable[..., Served], cold: dict) -> None:
    served = engine("position_fix")
    for name, prompt in (("donor", DONOR), ("other", OTHER)):
        answer = served.ask(prompt)
        assert (answer.tokens, answer.logprobs, answer.cached) == (cold[name].tokens, cold[name].logprobs, 0)


def test_text_that_vllm_has_forgotten_comes_back(engine: Callable[..., Served], cold: dict) -> None:
    served = engine("position_fix")
    served.ask(DONOR)
    served.settle()
    served.forget()
    answer = served.ask(DONOR)
    assert (answer.tokens, answer.cached) == (cold["donor"].tokens, len(DONOR) - 1)
    assert near(answer.logprobs, cold["donor"].logprobs)


def test_a_document_that_moved_is_reused_and_its_holes_are_computed(engine: Callable[..., Served]) -> None:
    served = engine("position_fix")
    served.ask(DONOR)
    served.settle()
    asks_for_exact = {"kv_transfer_params": {"semblend.exact_only": True}}
    assert served.ask([*some(21), *DOCUMENT], extra_args=asks_for_exact).cached == 0
    answer = served.ask(SHIFTED)
    assert answer.cached == 57 + len(DOCUMENT)
    assert served.runtime.mode.value == "wrapper"
    assert sum(served.runtime.faults.values()) == 0, served.runtime.faults


def test_with_all_layers_computed_again_answers_are_cold_ones(engine: Callable[..., Served], cold: dict) -> None:
    served = engine("boundary", {"recompute_boundary_layer": 8})
    served.ask(DONOR)
    served.settle()
    answer = served.ask(SHIFTED)
    assert answer.cached > 0
    assert answer.tokens == cold["shifted"].tokens
    assert near(answer.logprobs, cold["shifted"].logprobs)
