"""Weights that are written in a running engine: nothing that other weights computed is used afterwards."""

import random

import pytest
import torch
from torch import nn

from engine_wrapper.embedded.llm import SamplingParams
from engine_wrapper.embedded.model_runner import ModelRunner
from tests.builders.engine import DOCUMENT, DONOR, PREFILL, SHIFTED, SOME_KEPT, logits_of, serve, teach, text

FIRST_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True, return_generation_logits=True)


@pytest.fixture
def runner(tiny_qwen2_path):
    """A model of its own: the others' stays as it is."""
    return ModelRunner(tiny_qwen2_path, "float32", "cpu")


def scale(model, factor):
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(factor)


def load(model, factor):
    model.load_state_dict({name: each * factor for name, each in model.state_dict().items()})


def replace_one(model, factor):
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach() * factor, False)


WRITES = [scale, load, replace_one]


def assert_new(llm, output):
    """The first token's logits are those of Transformers' own forward with the weights of now."""
    with torch.inference_mode():
        expected = llm.executor.model_runner.model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
    assert torch.allclose(logits_of(output)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.promise("donors", "Once the weights of a running...")
@pytest.mark.parametrize("seed", range(4))
def test_no_token_is_of_weights_that_were_replaced(engine, runner, seed):
    """Prompts, writes between and during them, prefix caches that are reset at once, later, or while requests run."""
    drawn = random.Random(seed)
    llm = engine(runner=runner, POLICY="exact")
    model = llm.executor.model_runner.model
    documents = [text(100 + each, 80) for each in range(3)]
    writes = served = from_donors = 0
    is_stale = False
    while served < 50:
        prompt = [*drawn.choice(documents), *text(1000 + served, drawn.randrange(1, 40))]
        if drawn.random() < 0.25:
            stream = llm.generate_async(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
            for _ in range(drawn.randrange(1, 6)):
                llm.advance()
            drawn.choice(WRITES)(model, drawn.choice([0.97, 1.02]))
            writes, is_stale = writes + 1, True
            for _ in stream:
                pass
            llm.settle()
        elif drawn.random() < 0.15:
            drawn.choice(WRITES)(model, drawn.choice([0.97, 1.02]))
            writes, is_stale = writes + 1, True
        if is_stale and drawn.random() < 0.5:
            is_stale = not llm.reset_prefix_cache()
        output = serve(llm, prompt, FIRST_TOKEN)
        served += 1
        if not is_stale:  # what the engine itself keeps of other weights is its user's to forget
            assert_new(llm, output)
            llm.reset_prefix_cache()
        from_donors += output.reused_tokens
    assert writes > 5
    assert from_donors > 200


@pytest.mark.promise("donors", "A profile of other weights moves nothing, and holds again with its own")
def test_a_profile_of_other_weights_moves_nothing_and_holds_again_with_its_own(engine, runner, profile):
    path = profile(check=SOME_KEPT)
    llm = engine(runner=runner, PROFILE=path)
    model = llm.executor.model_runner.model
    first = {name: each.clone() for name, each in model.state_dict().items()}
    teach(llm, DONOR)
    assert serve(llm, SHIFTED).reused_tokens
    scale(model, 1.1)
    reused = []
    for _ in range(2):
        llm.reset_prefix_cache()
        teach(llm, DONOR)
        llm.reset_prefix_cache()
        reused.append(serve(llm, SHIFTED).reused_tokens)
        llm.reset_prefix_cache()
        reused.append(serve(llm, [*DONOR, 7]).reused_tokens)
        model.load_state_dict(first)
    assert reused[0] == 0 < reused[1]
    assert 0 < reused[2] <= len(DOCUMENT)
    ended = [(each["reason"], each["outcome"]) for each in engine.events("request_settled")]
    assert sum(reason == "profile_mismatch" for reason, _ in ended) == 1
    assert [each["are_first"] for each in engine.events("weights_changed")] == [False, True]


@pytest.mark.promise("donors", "Once the weights of a running...")
def test_donors_go_from_every_tier_and_so_do_saves(engine, runner, tmp_path):
    llm = engine(runner=runner, POLICY="exact", DISK_BYTES=1 << 24, DISK_PATH=tmp_path / "disk")
    llm.connector_worker.transfers.drain()
    teach(llm, DONOR, SHIFTED)
    llm.connector_worker.transfers.drain()
    assert list((tmp_path / "disk").rglob("*.safetensors"))
    list(llm.generate_async(text(7, 120), PREFILL))  # its save has not been heard of
    scale(llm.executor.model_runner.model, 1.1)
    serve(llm, text(8, 30), PREFILL)
    serve(llm, text(9, 30), PREFILL)
    llm.connector_worker.transfers.drain()
    held = llm.connector_scheduler.donor_index.held()
    assert (held.donors, held.host_bytes, held.disk_bytes) == (0, 0, 0)
    assert not list((tmp_path / "disk").rglob("*.safetensors"))
