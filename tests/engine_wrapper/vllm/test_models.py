"""Models of many kinds inside vLLM: mixtures, windows, chunks, layers that it calls otherwise, and their KV in e4m3.

Each engine is asked first what it answers cold, by vLLM's own forward."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from torch.cuda import is_available
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import attention

from engine_wrapper import self_check
from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm import engine_spec
from engine_wrapper.vllm.decoder import layer_calls_of
from tests.builders.vllm import (
    CHUNK,
    DOCUMENT,
    DONOR,
    FP8,
    MOVED,
    TINY_LAYERS,
    WINDOW,
    checked_at,
    exact,
    is_cold,
    needs_vision,
    on_card,
    some,
    taught,
)
from tests.random_models import MIXTURES, save_with_images

AGAIN = ("boundary", {"recompute_boundary_layer": TINY_LAYERS})
MOVE = ("position_fix", {})
COMPILED = {"enforce_eager": False}
ROUNDING = 5e-2 if is_available() else 0.0
# Which layers of Llama 4 have chunks and RoPE (1), from the lowest on.
MIXED, LOWER = ("llama4_text", 3, {"no_rope_layers": [1, 0, 1]}), ("llama4_text", 3, {"no_rope_layers": [1, 1, 0]})
# The document where the donor has it, after other tokens: its K and V are not turned, and so not rounded again.
IN_PLACE = [*some(20), *DOCUMENT, *some(40)]
IN_DONOR, IN_PROMPT, NEW = some(CHUNK), some(3 * CHUNK), some(60)
EARLY, LATER = 40, 50


def placed(early=0, later=0):
    """A donor and a prompt whose document begins so many tokens before a chunk's end, and `later` in the prompt."""
    return [*IN_DONOR[early:], *DOCUMENT], [*IN_PROMPT[early:], *NEW[:later], *DOCUMENT, *NEW[-30:]]


@pytest.fixture(scope="module", autouse=True)
def blocks_for_windows():
    """vLLM 0.28 gives layers with a window the shortest blocks that its kernel takes; all are to be alike."""
    with on_card({"block_size": 16}):
        yield


@dataclass(frozen=True)
class Case:
    """What is asked after a reused run. `by_ours`: once by vLLM's attention and once by ours."""

    family: str
    options: dict = field(default_factory=dict)
    policy: tuple = AGAIN
    layers: int = TINY_LAYERS
    own: dict = field(default_factory=dict)
    prompt: list = field(default_factory=lambda: MOVED, repr=False)
    donors: tuple = field(default=(DONOR,), repr=False)
    is_cold: bool = True
    by_ours: bool = False

    def __str__(self):
        policy, settings = self.policy
        return f"{self.family}-{self.layers}-{policy}{settings or ''}{self.options or ''}-{self.is_cold}"


def epic(family, heads, is_cold, prompt=MOVED, **options):
    """Above one layer with a window K and V depend on the tokens within it, the first `heads` of which are computed."""
    by_ours = family == "gpt_oss" and not options
    return Case(family, options, ("epic", {"epic_tokens": heads}), 2, {}, prompt, is_cold=is_cold, by_ours=by_ours)


def in_chunks(early, heads, later, is_cold):
    """Up to the first layer with full attention K and V depend on the tokens of their chunk alone."""
    donor, prompt = placed(early, later)
    policy = ("epic", {"epic_tokens": heads}) if heads else MOVE
    return Case(LOWER[0], {}, policy, 3, LOWER[2], prompt, (donor,), is_cold, by_ours=True)


# vLLM 0.28 runs OLMo-2 by the layers of Transformers, older versions by their own; SmolLM3 has none of vLLM's.
OTHER_CALLS = [("granite", {}), ("olmo2", {}), ("smollm3", {}), ("qwen3", {"model_impl": "transformers"})]
# Runs of two donors with new text between them, shorter than the window.
HOLES = [*MOVED[:70], *DOCUMENT[:250], *range(100, 130), *DOCUMENT[250:], *MOVED[-40:]]
CASES = [
    *(Case(family) for family in (*MIXTURES, "gemma3_text")),
    *(pytest.param(Case(*each), marks=pytest.mark.every_version) for each in OTHER_CALLS),
    *(Case(family, COMPILED) for family in ("glm4_moe", "llama4_text")),
    Case("qwen3_moe", {"max_num_batched_tokens": 64}),
    # Where it takes long prompts vLLM scales queries by their position.
    Case("llama4_text", {"override_generation_config": {"attn_temperature_tuning": True}}),
    Case("gpt_oss", {"max_num_batched_tokens": 128}),
    Case("llama4_text", {"max_num_batched_tokens": 64}),
    *(Case(family, FP8) for family in ("mixtral", "gpt_oss", "gemma3_text", "llama4_text")),
    *(Case(family, {}, MOVE, 1) for family in ("mixtral", "gpt_oss")),
    *(Case(*each, MOVE, 1) for each in OTHER_CALLS),
    *(Case(family, FP8, MOVE, 1, prompt=IN_PLACE) for family in ("qwen3_moe", "glm4_moe")),
    epic("gemma3_text", WINDOW - 1, True),
    epic("gpt_oss", WINDOW - 1, True),
    pytest.param(epic("gpt_oss", WINDOW - 2, False), marks=exact),
    epic("gpt_oss", WINDOW - 1, True, IN_PLACE, **FP8),
    epic("gemma3_text", WINDOW - 1, True, IN_PLACE, **FP8),
    pytest.param(epic("gpt_oss", WINDOW - 2, False, IN_PLACE, **FP8), marks=exact),
    Case("gpt_oss", {}, ("epic", {"epic_tokens": WINDOW - 1}), 2, {}, HOLES, (DOCUMENT[:250], DOCUMENT[250:])),
    in_chunks(0, 0, 0, True),
    in_chunks(0, 0, 1, False),
    in_chunks(EARLY, EARLY, 0, True),
    in_chunks(EARLY, EARLY - 1, 0, False),
]


@pytest.mark.promise("engines", "Mixtures of experts: rows that a...")
@pytest.mark.promise("engines", "Gemma 3's full attention and windows...")
@pytest.mark.promise("engines", "Documents many windows long are computed...")
@pytest.mark.promise("engines", "With chunks a moved run from...")
@pytest.mark.promise(
    "engines",
    "In vLLM layers that take hidden rows alone, and those of Transformers, are planned as others are; unknown ones "
    "are refused by name",
)
@pytest.mark.promise("engines", "In vLLM KV in e4m3 is...")
@pytest.mark.promise("engines", "Of a partial rotation only the...")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_after_a_reused_run_are_cold_ones(engine, tiny, case, monkeypatch):
    """Or others, where one token less is computed. The self-check has run both kinds of check; e4m3 has no sample."""
    if is_available() and case.by_ours:  # vLLM's attention takes float32 for TF32 there, ours does not
        monkeypatch.setattr(self_check, "_EXACT_BOUND", 1e-2)
    served = engine(*case.policy, model=tiny(case.family, case.layers, **case.own), **case.options)
    wanted = served.cold(case.prompt)
    taught(served, *case.donors)
    forward = served.worker._forward
    assert is_available() or forward._sparse == (case.options != FP8)
    rounding, attended = ROUNDING if case.family == "gpt_oss" else 0.0, []
    for by_ours in (False, True) if case.by_ours else (None,):
        if case.by_ours:
            apart = lambda _, by_ours=by_ours: attended.append(by_ours) or by_ours  # noqa: E731
            monkeypatch.setattr("engine_wrapper.vllm.attention.stand_apart", apart)
        answer = served.ask(case.prompt, max_tokens=8)
        assert served.offered >= len(DOCUMENT) - (served.runtime.pool.chunk or WINDOW)
        assert is_cold(answer, wanted, rounding) == case.is_cold
        served.forget()
    assert not case.by_ours or set(attended) == {False, True}


@needs_vision
@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text"])
def test_a_model_that_takes_images_is_served_for_text_alone(engine, tiny, tmp_path, family):
    """As Gemma 3 and Llama 4 are published."""
    served = engine(*AGAIN, model=save_with_images(tiny(family), tmp_path), language_model_only=True)
    wanted = served.cold(MOVED)
    assert is_cold(taught(served).ask(MOVED, max_tokens=8), wanted)
    assert served.offered >= len(DOCUMENT) - CHUNK


def test_experts_are_found_where_the_engine_counts_their_layers(engine, tiny, monkeypatch):
    """As vLLM does before torch 2.11."""
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.runner.moe_runner._USE_LAYERNAME", False)
    served = engine(*AGAIN, model=tiny("mixtral"))
    served.core.vllm_config.compilation_config.fast_moe_cold_start = True
    wanted = served.cold(MOVED)
    assert is_cold(taught(served).ask(MOVED, max_tokens=8), wanted)


def test_no_row_of_a_plan_counts_as_padding(engine, tiny):
    served = taught(engine(*AGAIN, model=tiny("mixtral")))
    model, found = served.runner.get_model(), []

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


@pytest.mark.parametrize(
    ("which", "check"),
    [(("gpt_oss", 4, {}), {"sample_every": 4, "sample_threshold": 0.0}), (MIXED, {})],
    ids=["windows", "chunks"],
)
def test_what_a_check_above_full_attention_finds_to_deviate_is_computed(engine, tiny, tmp_path, which, check):
    family, layers, own = which
    served = engine("position_fix", model=tiny(family, layers, **own))
    wanted = served.cold(MOVED)
    settings = checked_at(served, tmp_path, layer=2, threshold=0.0, max_span_share=1.0, **check)
    served = taught(engine("exact", settings, model=tiny(family, layers, **own)))
    assert is_cold(served.ask(MOVED, max_tokens=8), wanted, ROUNDING)
    report = served.report()
    assert report.recomputed_tokens == report.offered_tokens > len(DOCUMENT) // 2


@pytest.mark.promise("engines", "A check lies above a layer...")
def test_a_check_that_sees_no_further_than_a_window_is_refused_by_name(engine, tiny, tmp_path, caplog):
    served = engine("position_fix", model=tiny("gpt_oss", 4))
    wanted = served.cold(MOVED)
    served = taught(engine("exact", checked_at(served, tmp_path, layer=1, threshold=0.0), model=tiny("gpt_oss", 4)))
    answer = served.ask(MOVED, max_tokens=8)
    assert (answer.cached, is_cold(answer, wanted, ROUNDING)) == (0, True)
    assert served.report().reason == "profile_check_layer"
    assert "check layer 1 has no layer with full attention below it; 2 is the lowest" in caplog.text


# As long as the model's positions, which its YaRN stretches.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 128}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
STRETCHED = {"sliding_window": 2048, "rope_parameters": YARN}
no_such_blocks = pytest.mark.skipif(
    is_available(), reason="skipped: vLLM 0.25.1 did not start with such blocks there, and no newer one was tried"
)


@pytest.mark.parametrize(
    ("which", "options", "changed", "refusal"),
    [
        pytest.param(("gpt_oss", 2), {"block_size": 128}, None, "window_below_block", marks=no_such_blocks),
        (("gpt_oss", 2), {}, ("Attention", "per_layer_sliding_window", 1), "sliding_window"),
        (LOWER, {}, ("ChunkedLocalAttention", "attention_chunk_size", -CHUNK // 2), "sliding_window"),
        (("gpt_oss", 3, STRETCHED), {"max_model_len": 2048}, None, None),
        (("gpt_oss", 3, STRETCHED), {"max_model_len": 4096}, None, "sliding_window"),
    ],
    ids=["a window below a block", "other windows", "other chunks", "a window over all", "a prompt may outgrow it"],
)
def test_layers_that_see_other_tokens_than_the_models_are_refused_by_name(
    engine, tiny, which, options, changed, refusal, monkeypatch
):
    family, layers, own = (*which, {})[:3]
    if changed is not None:
        kind, option, change = changed
        stock = getattr(attention, kind).__init__

        def other(self, *arguments, **given):
            stock(self, *arguments, **{**given, **({option: given[option] + change} if given.get(option) else {})})

        monkeypatch.setattr(getattr(attention, kind), "__init__", other)
    assert engine("position_fix", model=tiny(family, layers, **own), **options).refusal == refusal


@pytest.mark.promise("engines", "Llama 4's layers with chunks turn...")
def test_keys_that_turn_as_those_of_transformers_are_not_vllms(engine, tiny, monkeypatch, caplog):
    monkeypatch.setattr(engine_spec, "LLAMA4", ())
    served = engine("position_fix", model=tiny(*LOWER[:2], **LOWER[2]))
    served.ask(DONOR, max_tokens=1)
    assert (served.runtime.mode.value, served.faults) == ("stock", {"self_check": 1})
    assert "(rope_unknown): keys that turn as the model's configuration says" in caplog.text


def other_call(hidden_states, positions, cache): ...


@pytest.mark.promise("engines", "In vLLM layers that take hidden...")
@pytest.mark.parametrize("forward", [other_call, lambda hidden_states, position_embeddings: None, lambda *rows: None])
def test_layers_that_take_something_else_are_refused_by_name(forward):
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(forward=forward)]))
    with pytest.raises(LayoutError, match="not known here") as refusal:
        layer_calls_of(model)
    assert refusal.value.reason == "layer_call"
