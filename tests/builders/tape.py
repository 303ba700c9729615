"""Graphs of whole forwards on a CPU, in which a tape stands for a CUDA graph."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
from vllm.forward_context import get_forward_context

from engine_wrapper.patches import replace_method
from engine_wrapper.vllm import attention, graphs, planned_forward
from engine_wrapper.vllm.attention import VllmRows
from engine_wrapper.vllm.graphs import WholeGraphs
from engine_wrapper.vllm.hooks import forward_context
from tests.engine_wrapper.watching import watched


class Tape:
    """Runs a forward again when it is replayed, with the tensors of its capture, as a card does."""

    def __init__(self):
        self.run = None

    def replay(self):
        self.run()


def capture_on_a_cpu(monkeypatch):
    """Has planned rows replayed whole from now on; returns what is captured."""
    running, captures, tensors_of = list[Tape](), list[Tape](), graphs._tensors
    # Attention on a CPU has a schedule whose size depends on the lengths.
    schedules = watched(monkeypatch, VllmRows, "_metadata", lambda built, *_: built.scheduler_metadata)

    @contextmanager
    def capture(tape, **_):
        running.append(tape)
        yield
        captures.append(running.pop())

    def recorded(own, stock):
        def forward(**rows):
            output = stock(**rows)
            if running:
                context = get_forward_context()
                held = {"attn_metadata": context.attn_metadata, "slot_mapping": context.slot_mapping}
                [metadata] = {id(each): each for each in context.attn_metadata.values()}.values()
                attending = [each.impl.forward for each in own._attention]

                def run():
                    metadata.scheduler_metadata = schedules[-1]
                    with forward_context(**held), ExitStack() as undo:
                        for each, attend in zip(own._attention, attending, strict=True):
                            undo.callback(replace_method(each.impl, "forward", attend))
                        output.copy_(stock(**rows))

                running[-1].run = run
            return output

        return forward

    initialise = WholeGraphs.__init__
    monkeypatch.setattr(WholeGraphs, "__init__", lambda own, stock, *rest: initialise(own, recorded(own, stock), *rest))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(graphs, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))

    def without_schedule(metadata):
        return {name: each for name, each in tensors_of(metadata).items() if name != "scheduler_metadata"}

    monkeypatch.setattr(graphs, "_tensors", without_schedule)
    for module in (attention, planned_forward):
        monkeypatch.setattr(module, "takes_whole_graphs", lambda _: True)
    return captures
