"""Runs of rows as sequences of their own: more of them than the engine serves requests, and short gaps closed."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, override_forward_context
from vllm.model_executor.custom_op import CustomOp

from engine_wrapper import deviation_check
from engine_wrapper.deviation_check import choose
from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm.attention import VllmRows, own_builder
from engine_wrapper.vllm.decoder import unfused_of
from engine_wrapper.vllm.hooks import StepGraphs
from semblend_trt.plan import SpanCheck
from tests.builders.vllm import near, random_tokens, taught
from tests.engine_wrapper.watching import watched

some = random_tokens(3)
DOCUMENT = some(600)
DONOR, MOVED = ([*some(count), *DOCUMENT, 7, 8, 9] for count in (30, 41))


@pytest.fixture
def runs(monkeypatch):
    return watched(monkeypatch, VllmRows, "_metadata", lambda built, *_: len(built.seq_lens))


def deviate(monkeypatch, every):
    """Every so many checked tokens one deviates, in place of what the check finds."""

    def chosen(check, deviations, *rest):
        found = (np.arange(len(deviations)) % every == 0).astype(np.float32)
        return choose(SpanCheck(check.layer, 0.5), found, *rest)

    monkeypatch.setattr(deviation_check, "choose", chosen)


def test_a_plan_may_have_more_runs_than_the_engine_serves_requests(engine, monkeypatch, runs):
    served = taught(engine("verified", kept=True, max_num_seqs=2), DONOR)
    deviate(monkeypatch, 18)
    with monkeypatch.context() as patched:
        patched.setattr(deviation_check, "ROWS_PER_GAP", 0)
        answer = served.ask(MOVED)
    assert answer.cached > 500
    found = served.report().figures
    assert 30 < max(runs) <= found["recomputed_tokens"] < 60
    assert found["offered_tokens"] == found["reused_tokens"] + found["recomputed_tokens"]
    served.forget()
    runs.clear()
    again = served.ask(MOVED)
    assert max(runs) < 3
    assert (again.tokens, again.cached) == (answer.tokens, answer.cached)
    assert near(again.logprobs, answer.logprobs)
    assert served.report().figures == found | {"largest_kept": served.report().figures["largest_kept"]}


def test_the_backend_is_left_as_it_is_where_it_attends(engine, monkeypatch):
    served = taught(engine("verified", kept=True, max_num_seqs=2), DONOR)
    attended = []
    monkeypatch.setattr(VllmRows, "_attend", lambda _, layer, *__, **___: attended.append(layer))
    assert served.ask(MOVED).cached > 500
    assert not attended


class Op(CustomOp):
    def __init__(self, kind):
        torch.nn.Module.__init__(self)
        self._forward_method = {"kernel": self.forward_cuda, "plain": self.forward_native}.get(kind, lambda: kind)

    def forward_native(self):
        return "plain"

    def forward_cuda(self):
        return "kernel"


def test_layers_called_one_by_one_run_kernels_and_are_left_as_they_were():
    kinds = ["plain", "kernel", "compiled"]
    ops = torch.nn.ModuleList(map(Op, kinds))
    calls = SimpleNamespace(embed=lambda ids: ids)
    parts = SimpleNamespace(unfused=unfused_of(ops), calls=calls, adapters=None)
    assert parts.unfused == (ops[0], ops[2])
    nothing = torch.empty(0)
    schedule = SimpleNamespace(positions=nothing, token_ids=nothing)
    with override_forward_context(SimpleNamespace()), VllmRows(parts, schedule, sparse=False) as rows:
        rows._begun()
        assert [op() for op in ops] == ["kernel"] * 3
    assert [op() for op in ops] == kinds


def test_the_builder_is_our_own_and_the_engine_keeps_its(engine):
    served = engine("verified", max_num_seqs=2, max_num_batched_tokens=512)
    parts = served.worker._forward._parts
    theirs = served.runner.attn_groups[0][0].get_metadata_builder(0)
    assert type(parts.builder) is type(theirs)
    assert parts.builder is not theirs
    assert parts.builder.vllm_config.scheduler_config.max_num_seqs == 512
    assert theirs.vllm_config.scheduler_config.max_num_seqs == 2


def test_a_backend_that_is_not_known_to_take_many_sequences_is_refused():
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: "FLASHINFER"))
    with pytest.raises(LayoutError, match="backend is FLASHINFER; use one of FLASH_ATTN") as refusal:
        own_builder(group, 512)
    assert refusal.value.reason == "attention_backend"


BUFFERS = torch.arange(64, dtype=torch.int32), torch.arange(100, 164), torch.arange(64) >= 20
LORAS = {"has_lora": True, "num_active_loras": 3}


@dataclass(eq=False)
class Part:
    rows: list
    addresses: list
    runtime_mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE

    @property
    def concrete_cudagraph_entries(self):
        entry = SimpleNamespace(cudagraph=object(), input_addresses=self.addresses)
        return {BatchDescriptor(count, **each): entry for count in self.rows for each in ({}, LORAS)}


def graphs_of(monkeypatch, *parts):
    monkeypatch.setattr(CUDAGraphWrapper, "_all_instances", set(parts))
    return StepGraphs(*(each[:20] for each in BUFFERS))


ADDRESSES = [each.data_ptr() for each in BUFFERS[:2]]


@pytest.mark.parametrize(("rows", "given"), [(1, 8), (8, 8), (9, 32), (32, 32), (33, None)])
@pytest.mark.parametrize("adapters", [0, 1, 3, 4])
def test_rows_are_padded_to_a_graph_in_the_buffers_that_it_reads(monkeypatch, rows, given, adapters):
    given = given if adapters <= LORAS["num_active_loras"] else None
    graphs = graphs_of(monkeypatch, Part([32, 8, 64], ADDRESSES), Part([8, 32], []), Part([2], [], CUDAGraphMode.FULL))
    ids, positions = torch.arange(rows) + 500, torch.arange(rows) + 900
    context = SimpleNamespace(batch_descriptor=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    with override_forward_context(context), graphs.replayed(ids, positions, adapters) as found:
        assert [each[:rows].tolist() for each in found] == [ids.tolist(), positions.tolist()]
        assert [len(each) for each in found] == [given or rows] * 2
        assert ([each.data_ptr() for each in found] == ADDRESSES) == (given is not None)
        mode = CUDAGraphMode.NONE if given is None else CUDAGraphMode.PIECEWISE
        assert get_forward_context().cudagraph_runtime_mode is mode
        assert context.batch_descriptor == (given and BatchDescriptor(given, **(LORAS if adapters else {})))
        assert given is None or BUFFERS[2][:given].tolist() == [row >= rows for row in range(given)]
    assert (context.batch_descriptor, context.cudagraph_runtime_mode) == (None, CUDAGraphMode.NONE)
    assert [each.tolist() for each in BUFFERS[:2]] == [list(range(64)), list(range(100, 164))]
    assert BUFFERS[2].tolist() == [row >= 20 for row in range(64)]


@pytest.mark.parametrize(
    "parts",
    [(), (Part([8], ADDRESSES[:1]),), (Part([8], ADDRESSES), Part([32], ADDRESSES)), (Part([], ADDRESSES),)],
    ids=["eager", "of another buffer", "of a part", "none captured"],
)
def test_other_graphs_are_left_alone(monkeypatch, parts):
    graphs = graphs_of(monkeypatch, *parts)
    given = torch.arange(4), torch.arange(4)
    with graphs.replayed(*given, 0) as found:
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in given]
