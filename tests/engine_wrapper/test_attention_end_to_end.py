"""Models whose attention is not plain, in the embedded engine: windows and sinks, chunks, and latent rows."""

import pytest
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError
from semblend_trt.reuse_profile import ProfileCheck
from tests.builders.engine import DOCUMENT, DONOR, GREEDY, SHIFTED, assert_same, serve, teach, text
from tests.random_models import CHUNK, WINDOW, save_tiny_model

# In gpt-oss and Llama 4 the layer in the middle has full attention, and a check lies above it.
LAYERS, CHECK_LAYER = 3, {"gpt_oss": 2, "llama4_text": 2, "deepseek_v3": 1}
# Pieces of a document that is cut where a chunk ends are short.
SHORT = {"MIN_SPAN": 30, "MIN_REUSE_RATIO": 0.1}
IN_DONOR, IN_PROMPT = 2 * CHUNK, 3 * CHUNK


@pytest.fixture(scope="module", params=CHECK_LAYER)
def family(request):
    return str(request.param)


@pytest.fixture(scope="module")
def runner(tiny_model_paths, family):
    return ModelRunner(tiny_model_paths[family], "float32", "cpu")


@pytest.fixture
def engine(tiny_model_paths, family, runner, engines_of):
    return engines_of(tiny_model_paths[family], runner=runner)


@pytest.mark.promise(
    "engines",
    "Documents many windows long are computed rightly in gpt-oss, after checks, in chunks, beside other requests "
    "and across holes",
)
@pytest.mark.promise("engines", "With chunks a moved run from...")
@pytest.mark.parametrize("check", [{}, {"sample_every": 8}], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_num_tokens": 64}, {"contract": "1.4"}], ids=str)
def test_what_a_check_finds_to_deviate_is_computed(engine, shifted, profile, family, check, options):
    """A random model's KV deviates wherever its context changes."""
    assert len(DOCUMENT) > 5 * WINDOW
    check = ProfileCheck(layer=CHECK_LAYER[family], threshold=0.0, **check)
    llm, output = shifted(PROFILE=profile(check=check), **SHORT, **options)
    report = llm.connector_scheduler.reuse_of(output.request_id)
    assert output.reused_tokens == 0
    assert report.recomputed_tokens == report.offered_tokens > len(DOCUMENT) // 2
    assert (report.offered_tokens < len(DOCUMENT)) == (family == "llama4_text")
    assert_same(output, serve(engine.cold(), SHIFTED))


@pytest.mark.promise("engines", "Plans over latent attention come out...")
@pytest.mark.promise("engines", "Documents many windows long are computed...")
def test_all_layers_computed_again_are_a_cold_run_with_holes_and_another_request(engine):
    first, second = DOCUMENT[:100], DOCUMENT[100:]
    prompts = [SHIFTED, text(5, 50) + first + text(6, 32) + second + text(7, 20), text(8, 150)]
    llm = engine(POLICY="boundary", RECOMPUTE_BOUNDARY_LAYER=LAYERS, **SHORT)
    teach(llm, DONOR, first, second)
    cold = engine.cold()
    for output, prompt in zip(llm.generate(prompts, [GREEDY] * 3), prompts, strict=True):
        assert_same(output, serve(cold, prompt))


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"], indirect=True)
def test_a_check_that_sees_no_further_than_a_window_or_a_chunk_is_refused_by_name(shifted, profile):
    _, output = shifted(PROFILE=profile(check=ProfileCheck(layer=1, threshold=1.0)), **SHORT)
    assert (output.reused_tokens, output.reuse_reason) == (0, "profile_check_layer")


@pytest.mark.parametrize("family", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"POLICY": "cacheblend"}, "configuration"),  # its check sees no further than a window
        ({"POLICY": "position_fix", "cache": {"tokens_per_block": 2 * WINDOW}}, "window_below_block"),
    ],
)
def test_what_windows_do_not_allow_is_refused_by_name(shifted, options, reason):
    _, output = shifted(**options)
    assert (output.reused_tokens, output.reuse_reason) == (0, reason)


@pytest.fixture(scope="module")
def lower_path(tmp_path_factory):
    return save_tiny_model("llama4_text", tmp_path_factory.mktemp("llama4"), no_rope_layers=[1, 1, 0])


@pytest.fixture
def lower(lower_path, engines_of):
    """Of a model whose highest layer alone has full attention: all K and V depend on the chunk alone."""
    return engines_of(lower_path)


def moved(engine, early, shift=0, **settings):
    """Its answer to a document `early` tokens before a chunk's end, `shift` later than in the donor, and a cold one."""
    llm = engine(**SHORT | settings)
    teach(llm, text(1, IN_DONOR - early) + DOCUMENT)
    prompt = text(2, IN_PROMPT - early + shift) + DOCUMENT + text(3, 20)
    return serve(llm, prompt), serve(engine.cold(), prompt)


@pytest.mark.promise(
    "engines",
    "With chunks a moved run from a chunk's first token on is that of a cold run, and answers after checks, holes "
    "and all layers computed again are, in the embedded engine and in vLLM, through vLLM's attention and through "
    "ours",
)
@pytest.mark.parametrize(
    ("early", "shift", "heads", "is_cold"), [(0, 0, 0, True), (20, 0, 20, True), (20, 0, 19, False), (0, 1, 0, False)]
)
def test_a_run_from_a_chunks_first_token_on_is_that_of_a_cold_run(lower, early, shift, heads, is_cold):
    """Where all of the run in its first chunk is computed, K and V are those of the new text."""
    policy = {"POLICY": "epic", "EPIC_TOKENS": heads} if heads else {"POLICY": "position_fix"}
    output, cold = moved(lower, early, shift, **policy)
    if is_cold:
        assert output.reused_tokens == len(DOCUMENT) - heads
        assert_same(output, cold)
        return
    assert output.reused_tokens
    with pytest.raises(AssertionError):
        assert_same(output, cold)


def test_a_run_that_is_cut_into_pieces_shorter_than_a_span_is_refused_by_name(lower):
    output, cold = moved(lower, 0, CHUNK // 2, POLICY="position_fix", MIN_SPAN=CHUNK // 2 + 1)
    assert (output.reused_tokens, output.reuse_reason) == (0, "chunk_edge")
    assert_same(output, cold)


@pytest.mark.parametrize("family", ["llama4_text"], indirect=True)
def test_blocks_that_do_not_divide_a_chunk_are_refused(engine):
    with pytest.raises(ConfigurationError, match=r"tokens_per_block 48 does not divide the chunks of 64 tokens"):
        engine(cache={"tokens_per_block": 48})


def test_transformers_that_caches_every_head_is_refused_when_the_model_is_loaded(tiny_model_paths, monkeypatch):
    monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    with pytest.raises(ConfigurationError, match="caches K and V of every head"):
        ModelRunner(tiny_model_paths["deepseek_v3"], "float32", "cpu")
