"""The forward at fixed addresses equals the one that follows the lengths; replayed graphs equal both."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.layer_schedule import LayerSchedule, build_schedule
from engine_wrapper.sequence_work import SequenceSlice
from engine_wrapper.sparse_forward import SparseForward
from kernels.layout import KvGeometry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (the extra `gpu`)")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 8
NUM_LAYERS = 3
TOLERANCE = 1e-4


class Bench:
    """One tiny model over a pool in which the KV of two prompts lies, up to their last `fresh` tokens."""

    def __init__(self, path: Path, fresh: int = 5, dtype: torch.dtype = torch.float32) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        geometry = KvGeometry(NUM_LAYERS, config.num_key_value_heads, head_dim, BLOCK_SIZE)
        pool = torch.full((20, NUM_LAYERS, 2, geometry.row_elements), float("nan"), dtype=dtype, device=DEVICE)
        self.forward = SparseForward(model, pool, geometry, fused=True)
        generator = torch.Generator().manual_seed(4)
        self.prompts = [tuple(torch.randint(0, 256, (length,), generator=generator).tolist()) for length in (61, 30)]
        self.blocks = [(3, 9, 1, 17, 0, 5, 12, 7), (2, 4, 19, 11)]
        self.fresh = fresh
        for index, prompt in enumerate(self.prompts):
            self.eager(self.schedule((index, 0, len(prompt) - fresh)))

    def schedule(self, *parts: tuple[int, int, int]) -> LayerSchedule:
        """Slices (prompt, begin, end), with the output row of each one's last token."""
        slices = [
            SequenceSlice(prompt, begin, self.prompts[prompt][begin:end], self.blocks[prompt])
            for prompt, begin, end in parts
        ]
        return build_schedule(slices, NUM_LAYERS).last_rows([end - begin for _, begin, end in parts])

    def eager(self, schedule: LayerSchedule) -> torch.Tensor:
        return self.forward.logits(self.forward(schedule.to(DEVICE)))


CASES = {
    "one row": [(0, 56, 57)],
    "a suffix": [(0, 56, 61)],
    "two sequences": [(0, 56, 61), (1, 25, 28)],
    "decode of two": [(1, 25, 26), (0, 56, 57)],
}


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kernels run through the interpreter where there is no card."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        read_loop_bounds(monkeypatch)


def read_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/kernels/conftest.py: NumPy 2.4 refuses `int` of the arrays in which the interpreter holds scalars."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.mark.parametrize(("family", "case"), [("qwen2", "one row"), ("qwen3", "two sequences")])
def test_fixed_addresses_equal_the_eager_forward(
    tiny_model_paths: dict[str, Path], family: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch)
    from engine_wrapper.graph_forward import StaticInputs, run_static, shape_of

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    bench = Bench(tiny_model_paths[family])
    decoder = bench.forward.fused
    assert decoder is not None
    first, second = bench.schedule(*CASES["two sequences"]), bench.schedule(*CASES[case])
    wanted = bench.eager(second)
    interpret(monkeypatch)
    shape = shape_of(second, decoder)
    inputs = StaticInputs(shape, 24, decoder.pool, decoder.geometry)
    with torch.inference_mode():
        if shape_of(first, decoder) == shape:
            inputs.upload(first)  # what an earlier batch left must not show
        inputs.upload(second)
        logits = run_static(decoder, shape, inputs)[: len(wanted)]
    torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_replayed_graphs_equal_the_eager_forward(
    tiny_model_paths: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = Bench(tiny_model_paths[family], dtype=dtype)
    assert bench.forward.fused is not None
    graphs = GraphForward(bench.forward.fused)
    for _ in range(2):
        for parts in CASES.values():
            schedule = bench.schedule(*parts)
            assert graphs.fits(schedule)
            wanted, actual = bench.eager(schedule), graphs(schedule)
            assert ((actual - wanted).norm() / wanted.norm()).item() <= (1e-5 if dtype == torch.float32 else 1e-2)
    assert len(graphs) <= len(CASES)


@needs_cuda
def test_no_more_graphs_than_there_is_room_for(tiny_qwen2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_wrapper import graph_forward

    monkeypatch.setattr(graph_forward, "MAX_GRAPHS", 1)
    bench = Bench(tiny_qwen2_path)
    assert bench.forward.fused is not None
    graphs = graph_forward.GraphForward(bench.forward.fused)
    graphs(bench.schedule((0, 56, 61)))
    assert graphs.fits(bench.schedule((0, 55, 61)))
    assert not graphs.fits(bench.schedule((0, 56, 57)))


@needs_cuda
def test_an_engine_that_is_dropped_meanwhile_does_not_end_a_capture(
    tiny_qwen2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_wrapper import graph_forward

    gc.freeze()  # the collector then looks at few objects, and at all of these soon
    old, bench = Bench(tiny_qwen2_path), Bench(tiny_qwen2_path)
    assert old.forward.fused is not None
    assert bench.forward.fused is not None
    dropped: list[Any] = [graph_forward.GraphForward(old.forward.fused)]
    dropped[0](old.schedule((0, 56, 57)))
    dropped.append(dropped)
    own_run, runs = graph_forward.run_static, []

    def run(*arguments: Any) -> torch.Tensor:
        nonlocal dropped
        runs.append(arguments)
        if len(runs) == 2:  # the capture, behind a run that warms up
            dropped = []
            assert all(not each for each in [[] for _ in range(300_000)])  # so many objects start collections
        return own_run(*arguments)

    schedule = bench.schedule((0, 56, 61))
    wanted = bench.eager(schedule)
    monkeypatch.setattr(graph_forward, "run_static", run)
    try:
        actual = graph_forward.GraphForward(bench.forward.fused)(schedule)
    finally:
        gc.unfreeze()
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=0)


@needs_cuda
def test_a_replay_never_waits_for_the_card(tiny_qwen2_path: Path) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = Bench(tiny_qwen2_path)
    assert bench.forward.fused is not None
    graphs = GraphForward(bench.forward.fused)
    schedule = bench.schedule((0, 56, 61))
    graphs(schedule)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs(bench.schedule((0, 56, 60)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_pieces_cover_every_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    from kernels.sparse_prefill.captured import MIN_PIECE, launch_shape

    geometry = KvGeometry(1, 4, 128, 32)
    shapes = set()
    for reach in (1, 255, 256, 257, 4096, 24_576, 32_768, 131_072):
        for rows, sequences, longest in ((1, 1, 1), (128, 1, 128), (8, 8, 1), (256, 4, 64)):
            shape = launch_shape(rows, sequences, longest, reach, (28, torch.bfloat16, torch.device(DEVICE)), geometry)
            assert (shape.pieces - 1) * MIN_PIECE < reach
            shapes.add(shape)
    assert len(shapes) <= 24
