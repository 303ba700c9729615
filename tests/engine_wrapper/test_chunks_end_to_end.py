"""Llama 4 in the embedded engine: documents several chunks long, in layers with chunks and in one without RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from engine_wrapper import sparse_forward
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError
from semblend_trt.reuse_profile import ProfileCheck
from tests.conftest import save_tiny_model
from tests.engine_wrapper.serving import DOCUMENT, DONOR, GREEDY, SHIFTED, Engines, assert_same, serve, teach, text
from tests.random_models import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine_wrapper.embedded.llm import RequestOutput

# The layer in the middle has full attention.
LAYERS = 3
# Pieces of a document that is cut where a chunk ends are short.
SHORT = {"MIN_SPAN": 30, "MIN_REUSE_RATIO": 0.1}
# Texts in front of the document.
IN_DONOR, IN_PROMPT = 2 * CHUNK, 3 * CHUNK


@pytest.fixture(scope="module")
def runner(tiny_model_paths: dict[str, Path]) -> ModelRunner:
    return ModelRunner(tiny_model_paths["llama4_text"], "float32", "cpu")


@pytest.fixture
def engine(tiny_model_paths: dict[str, Path], runner: ModelRunner, tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path / "audit.jsonl", model=tiny_model_paths["llama4_text"], runner=runner)
    yield engines
    engines.shutdown()


@pytest.fixture(scope="module")
def lower_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama4_text", tmp_path_factory.mktemp("llama4"), no_rope_layers=[1, 1, 0])


@pytest.fixture
def lower(lower_path: Path, tmp_path: Path) -> Iterator[Engines]:
    """Of a model whose highest layer alone has full attention: all K and V depend on the chunk alone."""
    engines = Engines(tmp_path / "lower.jsonl", model=lower_path)
    yield engines
    engines.shutdown()


def moved(engine: Engines, early: int, shift: int = 0, **settings: Any) -> tuple[RequestOutput, RequestOutput]:
    """What an engine under these settings answers behind a document that begins so many tokens before a chunk's end,
    and `shift` later in its chunk than in the donor, and what a cold one does."""
    llm = engine(**SHORT | settings)
    teach(llm, text(1, IN_DONOR - early) + DOCUMENT)
    prompt = text(2, IN_PROMPT - early + shift) + DOCUMENT + text(3, 20)
    return serve(llm, prompt), serve(engine.cold(), prompt)


@pytest.mark.parametrize(("early", "heads"), [(0, 0), (20, 20)])
def test_a_run_from_a_chunks_first_token_on_is_that_of_a_cold_run(lower: Engines, early: int, heads: int) -> None:
    """Where the tokens in front of it, in its first chunk, are computed, K and V are those of the new text."""
    policy = {"POLICY": "epic", "EPIC_TOKENS": heads} if heads else {"POLICY": "position_fix"}
    output, cold = moved(lower, early, **policy)
    assert output.reused_tokens == len(DOCUMENT) - heads
    assert_same(output, cold)


@pytest.mark.parametrize(("early", "shift", "heads"), [(20, 0, 19), (0, 1, 0)])
def test_a_token_more_is_that_of_another_text(lower: Engines, early: int, shift: int, heads: int) -> None:
    policy = {"POLICY": "epic", "EPIC_TOKENS": heads} if heads else {"POLICY": "position_fix"}
    output, cold = moved(lower, early, shift, **policy)
    assert output.reused_tokens
    with pytest.raises(AssertionError):
        assert_same(output, cold)


@pytest.mark.parametrize("check", [{}, {"sample_every": 8}], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_num_tokens": CHUNK}], ids=str)
def test_what_a_check_finds_to_deviate_is_computed(
    engine: Engines, profile: Callable[..., Path], check: dict[str, Any], options: dict[str, Any]
) -> None:
    """A random model's KV deviates wherever its context changes."""
    path = profile(check=ProfileCheck(layer=LAYERS - 1, threshold=0.0, **check))
    llm = engine(PROFILE=path, **SHORT, **options)
    teach(llm, DONOR)
    output = serve(llm, SHIFTED)
    report = llm.connector_scheduler.reuse_of(output.request_id)
    assert output.reused_tokens == 0
    assert report.recomputed_tokens == report.offered_tokens > len(DOCUMENT) // 2
    assert_same(output, serve(engine.cold(), SHIFTED))


def test_a_check_that_sees_no_further_than_a_chunk_is_refused_by_name(
    engine: Engines, profile: Callable[..., Path]
) -> None:
    llm = engine(PROFILE=profile(check=ProfileCheck(layer=1, threshold=1.0)), **SHORT)
    teach(llm, DONOR)
    assert serve(llm, SHIFTED).reuse_reason == "profile_check_layer"


def test_all_layers_computed_again_are_a_cold_run_with_holes_and_another_request(engine: Engines) -> None:
    first, second = DOCUMENT[:100], DOCUMENT[100:]
    prompts = [SHIFTED, text(5, 50) + first + text(6, CHUNK // 2) + second + text(7, 20), text(8, 150)]
    llm = engine(POLICY="boundary", RECOMPUTE_BOUNDARY_LAYER=LAYERS, **SHORT)
    teach(llm, DONOR, first, second)
    cold = engine.cold()
    for output, prompt in zip(llm.generate(prompts, [GREEDY] * 3), prompts, strict=True):
        assert_same(output, serve(cold, prompt))


def test_the_kernels_answer_as_torch_does(engine: Engines, interpret: Callable[[], None]) -> None:
    prompt = text(9, CHUNK + 20)
    expected = serve(engine.cold(), prompt)
    interpret()
    assert_same(serve(engine.cold(), prompt), expected)


def test_queries_are_scaled_by_their_positions_and_not_by_their_rows(
    lower: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, cold = moved(lower, 0, POLICY="position_fix")
    assert_same(output, cold)
    monkeypatch.setattr(sparse_forward._Places, "get_seq_length", lambda self, layer: 0)
    wrong, _ = moved(lower, 0, POLICY="position_fix")
    with pytest.raises(AssertionError):
        assert_same(wrong, cold)


def test_a_run_that_is_cut_into_pieces_shorter_than_a_span_is_refused_by_name(lower: Engines) -> None:
    output, cold = moved(lower, 0, CHUNK // 2, POLICY="position_fix", MIN_SPAN=CHUNK // 2 + 1)
    assert (output.reused_tokens, output.reuse_reason) == (0, "chunk_edge")
    assert_same(output, cold)


def test_blocks_that_do_not_divide_a_chunk_are_refused(engine: Engines) -> None:
    with pytest.raises(ConfigurationError, match=r"tokens_per_block 48 does not divide the chunks of 64 tokens"):
        engine(cache={"tokens_per_block": 48})
