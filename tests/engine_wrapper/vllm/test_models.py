"""Models of many kinds inside vLLM: mixtures, windows, chunks, layers that it calls otherwise, and their KV in e4m3."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from torch.cuda import is_available
from vllm.forward_context import get_forward_context

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm.decoder import layer_calls_of
from tests.conftest import MIXTURES, save_with_images
from tests.engine_wrapper.vllm.conftest import DOCUMENT, MOVED, TINY_LAYERS, WINDOW, near, needs_vision, some, taught
from tests.engine_wrapper.vllm.place import exact

pytestmark = pytest.mark.usefixtures("blocks_for_windows")

AGAIN = ("boundary", {"recompute_boundary_layer": TINY_LAYERS})
MOVE = ("position_fix", {})
FP8 = {"kv_cache_dtype": "fp8"}
COMPILED = {"enforce_eager": False}
# The document where the donor has it, after other tokens: its K and V are not turned, and so not rounded again.
IN_PLACE = [*some(20), *DOCUMENT, *some(40)]


@dataclass(frozen=True)
class Case:
    family: str
    options: dict = field(default_factory=dict)
    policy: tuple = AGAIN
    layers: int = TINY_LAYERS
    prompt: list = field(default_factory=lambda: MOVED, repr=False)
    is_cold: bool = True

    def __str__(self):
        policy, settings = self.policy
        return f"{self.family}-{self.layers}-{policy}{settings or ''}{self.options or ''}"


def epic(family, heads, is_cold, **options):
    """Above one layer with a window K and V depend on the tokens within it."""
    return Case(family, options, ("epic", {"epic_tokens": heads}), 2, IN_PLACE if options else MOVED, is_cold)


# vLLM 0.28 runs OLMo-2 by the layers of Transformers, older versions by their own; SmolLM3 has none of vLLM's.
OTHER_CALLS = [("granite", {}), ("olmo2", {}), ("smollm3", {}), ("qwen3", {"model_impl": "transformers"})]
CASES = [
    *(Case(family) for family in (*MIXTURES, "gemma3_text")),
    *(Case(*each) for each in OTHER_CALLS),
    Case("granite", COMPILED),
    Case("glm4_moe", COMPILED),
    Case("gpt_oss", COMPILED),
    Case("llama4_text", COMPILED),
    Case("qwen3_moe", {"max_num_batched_tokens": 64}),
    Case("gpt_oss", {"max_num_batched_tokens": 128}),
    Case("llama4_text", {"max_num_batched_tokens": 64}),
    *(Case(family, FP8) for family in ("mixtral", "gpt_oss", "gemma3_text", "llama4_text")),
    *(Case(family, {}, MOVE, 1) for family in ("mixtral", "gpt_oss")),
    *(Case(*each, MOVE, 1) for each in OTHER_CALLS),
    *(Case(family, FP8, MOVE, 1, IN_PLACE) for family in ("qwen3_moe", "glm4_moe")),
    epic("gemma3_text", WINDOW - 1, True),
    epic("gpt_oss", WINDOW - 1, True, **FP8),
    epic("gemma3_text", WINDOW - 1, True, **FP8),
    pytest.param(epic("gpt_oss", WINDOW - 2, False, **FP8), marks=exact),
]


def assert_cold(served, case, wanted):
    """A prompt, most of whose document vLLM does not compute, is answered as by a cold run, or otherwise."""
    answer = served.ask(case.prompt, max_tokens=16)
    assert served.offered >= len(DOCUMENT) - (served.runtime.pool.chunk or WINDOW)
    rounding = 5e-2 if is_available() and case.family == "gpt_oss" else 0.0
    is_cold = answer.tokens == wanted.tokens and near(answer.logprobs, wanted.logprobs, rounding)
    assert is_cold == case.is_cold


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_after_a_reused_run_are_cold_ones(engine, tiny, cold_of, case):
    """The self-check has run checks of both kinds, without a sample where the cache is in e4m3."""
    model = tiny(case.family, case.layers)
    by_stock = {} if "max_num_batched_tokens" in case.options else case.options
    wanted = cold_of(model, case.prompt, **by_stock)
    served = taught(engine(*case.policy, model=model, **case.options))
    if not is_available():
        assert served.worker._forward._sparse == (case.options != FP8)
    assert_cold(served, case, wanted)


@needs_vision
@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text"])
def test_a_model_that_takes_images_is_served_for_text_alone(engine, tiny, cold_of, tmp_path, family):
    """As Gemma 3 and Llama 4 are published."""
    wanted = cold_of(tiny(family), MOVED)
    model = save_with_images(tiny(family), tmp_path)
    assert_cold(taught(engine(*AGAIN, model=model, language_model_only=True)), Case(family), wanted)


def test_experts_are_found_where_the_engine_counts_their_layers(engine, tiny, cold_of, monkeypatch):
    """As vLLM does before torch 2.11."""
    wanted = cold_of(tiny("mixtral"), MOVED)
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.runner.moe_runner._USE_LAYERNAME", False)
    served = engine(*AGAIN, model=tiny("mixtral"))
    served.core.vllm_config.compilation_config.fast_moe_cold_start = True
    assert_cold(taught(served), Case("mixtral"), wanted)


def test_no_row_of_a_plan_counts_as_padding(engine, tiny):
    served = taught(engine(*AGAIN, model=tiny("mixtral")))
    model = served.core.model_executor.driver_worker.worker.model_runner.get_model()
    found = []

    def mark(module, arguments, options):
        get_forward_context().is_padding = options["positions"] < 0

    def note(module, arguments):
        found.append((len(arguments[0]), get_forward_context().is_padding))

    model.register_forward_pre_hook(mark, with_kwargs=True)
    model.model.layers[1].block_sparse_moe.register_forward_pre_hook(note)
    served.ask(MOVED, max_tokens=2)
    (rows, in_plan), (row, in_decode) = found
    assert (rows > len(DOCUMENT), in_plan) == (True, None)
    assert (row, in_decode.tolist() if in_decode is not None else None) == (1, [False])


def other(hidden_states, positions, cache): ...


@pytest.mark.parametrize("forward", [other, lambda hidden_states, position_embeddings: None, lambda *rows: None])
def test_layers_that_take_something_else_are_refused_by_name(forward):
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(forward=forward)]))
    with pytest.raises(LayoutError, match="not known here") as refusal:
        layer_calls_of(model)
    assert refusal.value.reason == "layer_call"


def test_layers_are_called_by_the_names_that_they_give():
    class Layer:
        def forward(self, hidden_states, positions, residual, scale=7):
            return 100 * positions + 10 * hidden_states + residual, scale

        __call__ = forward

    calls = layer_calls_of(SimpleNamespace(model=SimpleNamespace(layers=[Layer()])))
    assert calls.run(0, 1, (2, 3)) == (123, 7)
