"""Windows of gpt-oss and chunks of Llama 4 inside vLLM, through vLLM's own attention and through ours."""

import pytest
from torch.cuda import is_available

from engine_wrapper import self_check
from engine_wrapper.vllm import engine_spec
from engine_wrapper.vllm.attention import VllmRows
from tests.engine_wrapper.vllm.conftest import CHUNK, DOCUMENT, DONOR, MOVED, WINDOW, checked_at, near, some, taught
from tests.engine_wrapper.vllm.place import exact

pytestmark = pytest.mark.usefixtures("blocks_for_windows")

ROUNDING = 5e-2 if is_available() else 0.0
# Which layers of Llama 4 have chunks and RoPE (1), from the lowest on.
MIXED, LOWER = ("llama4_text", 3, {"no_rope_layers": [1, 0, 1]}), ("llama4_text", 3, {"no_rope_layers": [1, 1, 0]})
IN_DONOR, IN_PROMPT, NEW = some(CHUNK), some(3 * CHUNK), some(60)
EARLY, LATER = 40, 50
SCALED = {"override_generation_config": {"attn_temperature_tuning": True}}


@pytest.fixture
def model(tiny):
    return lambda family, layers, own=None: tiny(family, layers, **own or {})


def placed(early=0, later=0):
    """A donor and a prompt whose document begins so many tokens before a chunk's end, and `later` in the prompt."""
    return [*IN_DONOR[early:], *DOCUMENT], [*IN_PROMPT[early:], *NEW[:later], *DOCUMENT, *NEW[-30:]]


def asked(served, prompt=MOVED):
    answer = served.ask(prompt, max_tokens=16)
    assert served.offered >= len(DOCUMENT) - CHUNK
    return answer


def is_cold(answer, cold, rounding=0.0):
    return answer.tokens == cold.tokens and near(answer.logprobs, cold.logprobs, rounding)


def assert_cold_by_both(monkeypatch, served, prompt, wanted, is_same, rounding=0.0):
    """The answer is, or is not, the cold one, whether vLLM's attention runs the plan's rows or ours."""
    assert served.worker._forward._sparse  # the self-check has found our attention to be vLLM's
    attended = []
    for by_ours in (False, True):
        monkeypatch.setattr(VllmRows, "_stand_apart", lambda _, by_ours=by_ours: attended.append(by_ours) or by_ours)
        assert is_cold(asked(served, prompt), wanted, rounding) == is_same
        served.forget()
    assert set(attended) == {False, True}


@pytest.mark.parametrize(("heads", "is_same"), [(WINDOW - 1, True), pytest.param(WINDOW - 2, False, marks=exact)])
def test_a_window_reaches_as_far_into_a_moved_run(engine, model, cold_of, heads, is_same, monkeypatch):
    """Above one layer with a window, K and V depend on the tokens within it, whose first `heads` are computed."""
    if is_available():  # vLLM's attention takes float32 for TF32 there, ours does not
        monkeypatch.setattr(self_check, "_EXACT_BOUND", 1e-2)
    two = model("gpt_oss", 2)
    wanted = cold_of(two, MOVED)
    served = taught(engine("epic", {"epic_tokens": heads}, model=two))
    assert_cold_by_both(monkeypatch, served, MOVED, wanted, is_same, ROUNDING)


@pytest.mark.parametrize(
    ("early", "heads", "later", "is_same"),
    [(0, 0, 0, True), (0, 0, 1, False), (EARLY, EARLY, 0, True), (EARLY, EARLY - 1, 0, False)],
)
def test_from_a_chunks_first_token_on_a_moved_run_is_that_of_a_cold_run(
    engine, model, cold_of, early, heads, later, is_same, monkeypatch
):
    """Up to the first layer with full attention K and V depend on the tokens of their chunk alone."""
    donor, prompt = placed(early, later)
    wanted = cold_of(model(*LOWER), prompt)
    policy, settings = ("epic", {"epic_tokens": heads}) if heads else ("position_fix", {})
    served = taught(engine(policy, settings, model=model(*LOWER)), donor)
    assert_cold_by_both(monkeypatch, served, prompt, wanted, is_same)


def test_holes_in_a_window_are_computed(engine, model, cold_of):
    """Runs of two donors with new text between them, shorter than the window."""
    first, second = DOCUMENT[:250], DOCUMENT[250:]
    prompt = [*MOVED[:70], *first, *range(100, 130), *second, *MOVED[-40:]]
    wanted = cold_of(model("gpt_oss", 2), prompt)
    served = taught(engine("epic", {"epic_tokens": WINDOW - 1}, model=model("gpt_oss", 2)), first, second)
    assert is_cold(asked(served, prompt), wanted, ROUNDING)
    assert served.offered >= len(DOCUMENT)


def test_where_queries_are_scaled_by_their_position_answers_are_cold_ones_too(engine, model, cold_of):
    """vLLM does so where it takes long prompts; the KV is that of another engine then."""
    wanted = cold_of(model(*MIXED), MOVED, **SCALED)
    assert not is_cold(wanted, cold_of(model(*MIXED), MOVED))
    served = taught(engine("boundary", {"recompute_boundary_layer": 3}, model=model(*MIXED), **SCALED))
    assert is_cold(asked(served), wanted)
    assert served.scheduler.namespace.backend_cache_layout.endswith("/scaled")


def test_keys_that_turn_as_those_of_transformers_are_not_vllms(engine, model, monkeypatch, caplog):
    monkeypatch.setattr(engine_spec, "LLAMA4", ())
    served = engine("position_fix", model=model(*LOWER))
    served.ask(DONOR, max_tokens=1)
    assert (served.runtime.mode.value, served.faults) == ("stock", {"self_check": 1})
    assert "(rope_unknown): keys that turn as the model's configuration says" in caplog.text


@pytest.mark.parametrize("check", [{}, {"sample_every": 4, "sample_threshold": 0.0}], ids=str)
@pytest.mark.parametrize("which", [("gpt_oss", 4), MIXED], ids=["windows", "chunks"])
def test_what_a_check_above_full_attention_finds_to_deviate_is_computed(engine, model, cold_of, tmp_path, which, check):
    wanted = cold_of(model(*which), MOVED)
    served = engine("position_fix", model=model(*which))
    settings = checked_at(served, tmp_path, layer=2, threshold=0.0, max_span_share=1.0, **check)
    served = taught(engine("exact", settings, model=model(*which)))
    assert is_cold(asked(served), wanted, ROUNDING)
    report = served.scheduler.outcomes.of(served.last)
    assert report.recomputed_tokens == report.offered_tokens > len(DOCUMENT) // 2


def test_a_check_that_sees_no_further_than_a_window_is_refused_by_name(engine, model, cold_of, tmp_path, caplog):
    four = model("gpt_oss", 4)
    wanted = cold_of(four, MOVED)
    settings = checked_at(engine("position_fix", model=four), tmp_path, layer=1, threshold=0.0)
    served = taught(engine("exact", settings, model=four))
    found = served.ask(MOVED, max_tokens=16)
    assert (found.cached, is_cold(found, wanted, ROUNDING)) == (0, True)
    assert served.scheduler.outcomes.of(served.last).reason == "profile_check_layer"
    assert "check layer 1 has no layer with full attention below it; 2 is the lowest" in caplog.text


def test_a_run_that_is_cut_into_pieces_shorter_than_a_span_is_refused_by_name(engine, model, cold_of):
    donor, prompt = placed(later=LATER)
    wanted = cold_of(model(*LOWER), prompt)
    served = taught(engine("position_fix", {"min_span_tokens": CHUNK - LATER + 1}, model=model(*LOWER)), donor)
    answer = served.ask(prompt, max_tokens=16)
    assert (answer.cached, is_cold(answer, wanted)) == (0, True)
    assert served.scheduler.outcomes.of(served.last).reason == "chunk_edge"


@pytest.mark.skipif(is_available(), reason="skipped: vLLM 0.25.1 does not start with such blocks on a card")
def test_a_window_shorter_than_a_block_is_refused_by_name(engine, model, cold_of):
    wanted = cold_of(model("gpt_oss", 2), MOVED)
    served = engine("position_fix", model=model("gpt_oss", 2), block_size=128)
    assert served.ask(MOVED, max_tokens=16).tokens == wanted.tokens
    assert served.refusal == "window_below_block"


@pytest.mark.parametrize(
    ("which", "kind", "option", "change"),
    [
        (("gpt_oss", 2), "Attention", "per_layer_sliding_window", 1),
        (LOWER, "ChunkedLocalAttention", "attention_chunk_size", -CHUNK // 2),
    ],
    ids=["windows", "chunks"],
)
def test_layers_that_see_other_tokens_than_the_models_are_refused_by_name(
    engine, model, which, kind, option, change, monkeypatch
):
    from vllm.model_executor.layers import attention

    stock = getattr(attention, kind).__init__

    def other(self, *arguments, **options):
        if options.get(option):
            options[option] += change
        stock(self, *arguments, **options)

    monkeypatch.setattr(getattr(attention, kind), "__init__", other)
    assert engine("position_fix", model=model(*which)).refusal == "sliding_window"


def test_a_window_that_the_longest_prompt_outgrows_is_refused_by_name(engine, tiny):
    """As long as the model's positions, which its YaRN stretches."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 128}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    model = tiny("gpt_oss", sliding_window=2048, rope_parameters=yarn)
    assert engine("position_fix", model=model, max_model_len=2048).runtime.refusal is None
    assert engine("position_fix", model=model, max_model_len=4096).refusal == "sliding_window"
