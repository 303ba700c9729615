"""Whole forwards are captured once for each size, and replayed with what later steps hand over."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from engine_wrapper.vllm import attention
from engine_wrapper.vllm.attention import own_builder, takes_whole_graphs
from engine_wrapper.vllm.graphs import room_for
from tests.builders.tape import Tape, capture_on_a_cpu
from tests.builders.vllm import near, random_tokens, taught

some = random_tokens(3)
DOCUMENT = some(600)
DONOR = [*some(30), *DOCUMENT, *some(5)]
# Two runs of new tokens, or seven of them.
FEW = [[*some(new), *DOCUMENT[first:], *some(9)] for new, first in ((41, 0), (20, 0), (33, 80))]
MANY = [
    [token for first in range(0, 600, 100) for token in (*some(new), *DOCUMENT[first : first + 90])] for new in (4, 7)
]
# The first one finds its own blocks again, which padding of the later ones must not have spoiled.
PROMPTS = [*FEW, *MANY, [*some(52), *DOCUMENT, *some(50)], FEW[0]]


@pytest.fixture
def captured(wanted, monkeypatch):
    return capture_on_a_cpu(monkeypatch)


def taught_answers(engine):
    served = taught(engine("position_fix"), DONOR)
    return served, [served.ask(prompt) for prompt in PROMPTS]


def assert_alike(found, wanted):
    assert [(each.tokens, each.cached) for each in found] == [(each.tokens, each.cached) for each in wanted]
    assert all(near(one.logprobs, other.logprobs) for one, other in zip(found, wanted, strict=True))


@pytest.fixture
def wanted(engine):
    return taught_answers(engine)[1]


def test_rows_replayed_whole_get_the_same_answers(wanted, engine, captured):
    served, found = taught_answers(engine)
    sizes = [*served.worker._forward._wholes._captured]
    # With the queries of four layers in the self-check.
    assert sorted(sizes) == [(64, 4, 0, 0), (64, 16, 0, 0), (128, 4, 0, 0), (256, 4, 0, 0), (256, 4, 0, 4)]
    assert len(captured) == len(sizes)
    assert_alike(found, wanted)
    served.ask(some(100))  # without a plan
    assert len(captured) == len(sizes)


def test_without_a_capture_rows_get_the_same_answers(wanted, engine, captured, monkeypatch, caplog):
    monkeypatch.setattr(Tape, "__init__", lambda own: own.missing)
    served, found = taught_answers(engine)
    assert_alike(found, wanted)
    assert (captured, served.refusal, dict(served.faults)) == ([], None, {"whole_graph": 1})
    assert "not captured on this engine" in caplog.text


@pytest.mark.parametrize(
    ("rows", "sequences", "room"),
    [(1, 1, (64, 4)), (64, 5, (64, 16)), (65, 16, (128, 16)), (256, 64, (256, 64)), (257, 1, None), (9, 65, None)],
)
def test_a_forward_gets_the_smallest_room(rows, sequences, room):
    assert room_for(rows, sequences) == room


class Builder:
    def __init__(self, spec, names, config, device):
        self.kv_cache_spec, self.vllm_config, self.device = spec, config, device

    def get_cudagraph_support(self, config, spec):
        return config.support


@pytest.mark.parametrize(
    ("name", "support", "mode", "ranks", "is_whole"),
    [
        ("FLASH_ATTN", AttentionCGSupport.ALWAYS, CUDAGraphMode.FULL_AND_PIECEWISE, 1, True),
        ("FLASH_ATTN", AttentionCGSupport.ALWAYS, CUDAGraphMode.PIECEWISE, 1, True),
        ("FLASH_ATTN", AttentionCGSupport.UNIFORM_BATCH, CUDAGraphMode.PIECEWISE, 1, False),
        ("FLASH_ATTN", AttentionCGSupport.ALWAYS, CUDAGraphMode.NONE, 1, False),
        ("FLASH_ATTN", AttentionCGSupport.ALWAYS, CUDAGraphMode.PIECEWISE, 2, False),
        ("TRITON_ATTN", AttentionCGSupport.ALWAYS, CUDAGraphMode.PIECEWISE, 1, False),
    ],
)
def test_metadata_is_for_whole_graphs_where_they_hold(monkeypatch, name, support, mode, ranks, is_whole):
    monkeypatch.setattr(attention, "set_current_vllm_config", nullcontext)
    config = SimpleNamespace(
        support=support,
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    theirs = Builder(None, [], config, None)
    backend = SimpleNamespace(get_name=lambda: name)
    group = SimpleNamespace(backend=backend, layer_names=[], get_metadata_builder=lambda _: theirs)
    own = own_builder(group, 512)
    assert takes_whole_graphs(own) == is_whole
    assert own.vllm_config.compilation_config.cudagraph_mode is (CUDAGraphMode.FULL if is_whole else CUDAGraphMode.NONE)
    assert config.compilation_config.cudagraph_mode is mode
