"""Forwards at fixed addresses, whole or what a check leaves, equal those that follow the lengths; replayed graphs equal
both, and graphs made ahead write nothing."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.fused_layers import BegunLayer, FusedRows
from engine_wrapper.layer_schedule import build_schedule
from engine_wrapper.sequence_work import SequenceSlice
from kernels.layout import KvGeometry
from semblend_trt.plan import SpanCheck
from semblend_trt.ranks import Ranks
from semblend_trt.streams import finish, on, side_stream
from tests.engine_wrapper.forward_bench import (
    DEVICE,
    FUSED,
    NUM_LAYERS,
    SIZES,
    TOLERANCE,
    Bench,
    attach_pool,
    close_by_norm,
    load,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine_wrapper.layer_schedule import LayerSchedule

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (the extra `gpu`)")
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

PROMPTS = [tokens_of(61, 4), tokens_of(30, 5)]
CASES = {
    "one row": [(1, 56, 57)],
    "a suffix": [(1, 56, 61)],
    "two sequences": [(1, 56, 61), (2, 25, 28)],
    "decode of two": [(2, 25, 26), (1, 56, 57)],
}
BLOCK_ROOM = 24


class GraphBench(Bench):
    """The KV of two prompts lies in the pool, up to their last 5 tokens."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(load(path, dtype), fused=True, kv_dtype=kv_dtype)
        for request_id, prompt in enumerate(PROMPTS, start=1):
            self.run(self.slice(request_id, prompt, 0, len(prompt) - 5))

    def schedule(self, *parts: tuple[int, int, int]) -> LayerSchedule:
        """Slices (request, begin, end), with the output row of each one's last token."""
        slices = [self.slice(each, PROMPTS[each - 1], begin, end) for each, begin, end in parts]
        return build_schedule(slices, NUM_LAYERS)

    def eager(self, schedule: LayerSchedule) -> torch.Tensor:
        return self.forward.logits(self.forward(schedule.to(DEVICE)))


LENGTH, SPAN = 45, (6, 40)


class CheckedBench(Bench):
    """Another prompt's KV in the place of a span, wrong at two tokens only."""

    def __init__(self, path: Path, make_plan: Any, check_layer: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(load(path, dtype), fused=True)
        prompt = tokens_of(LENGTH, 4)
        self.run(self.slice(1, prompt))
        kv = self.kv(1)
        kv[:, :, :, [20, 33]] *= 2
        self.place(1, kv, *SPAN)
        self.donor = self.pool.clone()
        plan = make_plan(prompt, [SPAN], check=SpanCheck(check_layer, 0.3), **SIZES)
        self.planned_schedule = build_schedule([self.planned(plan)], NUM_LAYERS)
        self.decode = build_schedule([self.slice(1, prompt, LENGTH - 1)], NUM_LAYERS)

    def over_the_donor(self, **options: Any) -> torch.Tensor:
        """The output rows of the plan, over the donor's KV again."""
        self.pool.copy_(self.donor)
        return self.forward(self.planned_schedule.to(DEVICE), **options)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "case"), [("qwen2", "one row"), ("qwen3", "two sequences")])
def test_fixed_addresses_equal_the_eager_forward(
    tiny_model_paths: dict[str, Path], family: str, case: str, interpret: Callable[[], None]
) -> None:
    bench = GraphBench(tiny_model_paths[family])
    first, second = bench.schedule(*CASES["two sequences"]), bench.schedule(*CASES[case])
    wanted = bench.eager(second)
    interpret()
    from engine_wrapper.graph_forward import StaticInputs, run_static, shape_of

    shape = shape_of(second, bench.decoder)
    inputs = StaticInputs(shape, BLOCK_ROOM, bench.pool, bench.geometry)
    with torch.inference_mode():
        if shape_of(first, bench.decoder) == shape:
            inputs.fill(first)  # what an earlier batch left must not show
        inputs.fill(second)
        assert_close(run_static(bench.decoder, shape, inputs)[: len(wanted)], wanted)


@pytest.mark.parametrize("check_layer", [0, NUM_LAYERS - 1])
def test_what_a_check_leaves_at_fixed_addresses_equals_the_eager_forward(
    tiny_qwen3_path: Path, make_plan: Any, interpret: Callable[[], None], check_layer: int
) -> None:
    bench = CheckedBench(tiny_qwen3_path, make_plan, check_layer)
    wanted = bench.over_the_donor()
    bench.pool.copy_(bench.donor)
    schedule = bench.planned_schedule.to(DEVICE)
    assert schedule.check is not None
    with torch.inference_mode():
        rows = FusedRows(bench.decoder, schedule)
        for stage, layers in schedule.layers_of_stages(NUM_LAYERS):
            rows.enter(stage)
            for layer in layers:
                rows.run(layer)
        rest, _ = schedule.check.decide(rows.compare(schedule.check, Ranks()))
        begun = rows.begun(check_layer, rest.stages[0].keep)
    # The hole in front, what was planted, and the suffix.
    assert len(begun.heads) == SPAN[0] + 2 + LENGTH - SPAN[1]
    interpret()
    from engine_wrapper.graph_forward import StaticInputs, run_static, shape_of

    shape = shape_of(rest, bench.decoder)
    inputs = StaticInputs(shape, BLOCK_ROOM, bench.pool, bench.geometry)
    with torch.inference_mode():
        room = BegunLayer(
            check_layer, *(each.new_zeros(shape.rows, *each.shape[1:]) for each in (begun.residual, begun.heads))
        )
        room.fill(begun)
        inputs.fill(rest)
        assert_close(run_static(bench.decoder, shape, inputs, room)[: len(wanted)], wanted)


@pytest.mark.parametrize("first", range(NUM_LAYERS))
def test_parts_hold_every_layer_from_the_first_on_once(first: int, interpret: Callable[[], None]) -> None:
    interpret()
    from engine_wrapper.graph_forward import LAYERS_A_GRAPH, parts_of

    for num_layers in (NUM_LAYERS, 28, 29):
        parts = parts_of(first, num_layers)
        assert [layer for part in parts for layer in part] == list(range(first, num_layers))
        assert len(parts[0]) == 1
        assert max(map(len, parts)) <= LAYERS_A_GRAPH


def test_each_part_reads_the_kv_of_its_own_layers_only(tiny_qwen2_path: Path, interpret: Callable[[], None]) -> None:
    bench = GraphBench(tiny_qwen2_path)
    schedule = bench.schedule(*CASES["a suffix"])
    present = bench.pool.clone()
    wanted = bench.eager(schedule)
    bench.clear()
    interpret()
    from engine_wrapper.graph_forward import StaticInputs, run_static, shape_of

    shape = shape_of(schedule, bench.decoder)
    inputs = StaticInputs(shape, BLOCK_ROOM, bench.pool, bench.geometry)

    @contextmanager
    def arriving(layers: range) -> Iterator[None]:
        own = slice(layers.start, layers.stop)
        bench.pool[:, own] = present[:, own]
        yield
        bench.pool.fill_(float("nan"))

    with torch.inference_mode():
        inputs.fill(schedule)
        assert_close(run_static(bench.decoder, shape, inputs, None, arriving)[: len(wanted)], wanted)


def test_inputs_without_writes_leave_the_pool_alone(tiny_qwen2_path: Path, interpret: Callable[[], None]) -> None:
    bench = GraphBench(tiny_qwen2_path)
    bench.pool.zero_()
    before = bench.pool.clone()
    interpret()
    from engine_wrapper.graph_forward import StaticInputs, run_static, shape_of

    schedule = bench.schedule(*CASES["a suffix"])
    shape = shape_of(schedule, bench.decoder)
    inputs = StaticInputs(shape, BLOCK_ROOM, bench.pool, bench.geometry)
    with torch.inference_mode():
        inputs.fill(schedule, writes=False)
        assert run_static(bench.decoder, shape, inputs)[0].isfinite().all()
        assert torch.equal(bench.pool, before)
        inputs.fill(schedule)
        run_static(bench.decoder, shape, inputs)
        assert not torch.equal(bench.pool, before)


def test_a_shape_has_no_piece_beyond_its_reach(interpret: Callable[[], None]) -> None:
    interpret()
    from kernels.sparse_prefill.captured import MIN_PIECE, launch_shape

    geometry = KvGeometry(1, 4, 128, 32)
    shapes = set()
    for reach in (1, 255, 256, 257, 4096, 24_576, 32_768, 131_072):
        for rows, sequences, longest in ((1, 1, 1), (128, 1, 128), (8, 8, 1), (256, 4, 64)):
            shape = launch_shape(rows, sequences, longest, reach, (28, torch.bfloat16, torch.device(DEVICE)), geometry)
            assert (shape.pieces - 1) * MIN_PIECE < reach
            shapes.add(shape)
    assert len(shapes) <= 24


# -- replayed on a card -----------------------------------------------------------------------------------------------


@needs_cuda
@dtypes
@pytest.mark.parametrize("family", FUSED)
def test_replayed_graphs_equal_the_eager_forward(
    tiny_model_paths: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = GraphBench(tiny_model_paths[family], dtype)
    graphs = GraphForward(bench.decoder)
    for _ in range(2):
        for parts in CASES.values():
            schedule = bench.schedule(*parts)
            assert graphs.fits(schedule)
            assert close_by_norm(graphs(schedule), bench.eager(schedule), dtype)
    assert len(graphs) <= len(CASES)


@needs_cuda
@dtypes
def test_replayed_graphs_over_kv_in_fp8_equal_the_eager_forward(tiny_qwen3_path: Path, dtype: torch.dtype) -> None:
    """But for what e4m3 makes of sums in another order."""
    from engine_wrapper.graph_forward import GraphForward

    bench = GraphBench(tiny_qwen3_path, dtype, torch.float8_e4m3fn)
    graphs = GraphForward(bench.decoder)
    for parts in CASES.values():
        schedule = bench.schedule(*parts)
        assert graphs.fits(schedule)
        wanted = bench.eager(schedule)
        assert (graphs(schedule) - wanted).norm() <= 0.05 * wanted.norm()


@needs_cuda
def test_what_other_threads_queue_meanwhile_is_part_of_no_graph(tiny_qwen2_path: Path) -> None:
    """PyTorch gives the same streams out again: more of them than it has are in use while graphs are captured."""
    from engine_wrapper.graph_forward import GraphForward

    bench = GraphBench(tiny_qwen2_path)
    graphs, schedules = GraphForward(bench.decoder), [bench.schedule(*parts) for parts in CASES.values()]
    wanted = [bench.eager(schedule) for schedule in schedules]
    streams = [side_stream(bench.pool.device) for _ in range(64)]
    captured, failed = threading.Event(), list[BaseException]()

    def save() -> None:
        rows = torch.zeros(8, device=bench.pool.device)
        try:
            while not captured.is_set():
                for stream in streams:
                    with on(stream):
                        rows += 1.0
                    finish(stream)
        except RuntimeError as error:
            failed.append(error)

    saver = threading.Thread(target=save)
    saver.start()
    try:
        found = [graphs(schedule).clone() for schedule in schedules]
    finally:
        captured.set()
        saver.join()
    assert failed == []
    assert all(close_by_norm(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@needs_cuda
def test_a_replay_waits_for_each_layer_ahead_of_its_graph(tiny_qwen2_path: Path) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = GraphBench(tiny_qwen2_path)
    graphs, schedule, asked = GraphForward(bench.decoder), bench.schedule(*CASES["a suffix"]), []
    present, aside = bench.pool.clone(), torch.cuda.Stream()
    wanted = bench.eager(schedule)

    def arrive(layer: int) -> None:
        """As a load does: the layer comes on another stream, and late."""
        asked.append(layer)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            torch.cuda._sleep(20_000_000)
            bench.pool[:, layer] = present[:, layer]
        torch.cuda.current_stream().wait_stream(aside)

    for _ in range(2):
        bench.clear()
        asked.clear()
        assert close_by_norm(graphs(schedule, wait=arrive), wanted)
        assert asked == list(range(NUM_LAYERS))


@needs_cuda
@dtypes
@pytest.mark.parametrize("check_layer", range(NUM_LAYERS))
@pytest.mark.parametrize("family", FUSED)
def test_what_a_check_leaves_is_replayed_as_it_runs_eagerly(
    tiny_model_paths: dict[str, Path], make_plan: Any, family: str, check_layer: int, dtype: torch.dtype
) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = CheckedBench(tiny_model_paths[family], make_plan, check_layer, dtype)
    graphs, wanted = GraphForward(bench.decoder), bench.over_the_donor()
    for _ in range(2):
        assert close_by_norm(bench.over_the_donor(graphs=graphs), wanted, dtype)
    assert len(graphs) == 1


@needs_cuda
def test_hooks_keep_graphs_away(tiny_qwen2_path: Path, make_plan: Any) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = CheckedBench(tiny_qwen2_path, make_plan, 1)
    graphs, layers = GraphForward(bench.decoder), []
    bench.over_the_donor(after_layer=layers.append, graphs=graphs)
    assert layers == list(range(NUM_LAYERS))
    assert len(graphs) == 0


@needs_cuda
def test_graphs_made_ahead_serve_and_write_nothing(tiny_qwen2_path: Path, make_plan: Any) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = CheckedBench(tiny_qwen2_path, make_plan, 1)
    wanted = bench.over_the_donor()
    bench.pool.copy_(bench.donor.nan_to_num(0.0))
    before = bench.pool.clone()
    graphs = GraphForward(bench.decoder)
    graphs.prepare([LENGTH, LENGTH], [1])
    assert torch.equal(bench.pool, before)
    made = len(graphs)
    assert made > 0
    actual = bench.over_the_donor(graphs=graphs)
    graphs(bench.decode)
    assert len(graphs) == made
    assert_close(actual, wanted)


@needs_cuda
def test_no_more_graphs_than_there_is_room_for(tiny_qwen2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_wrapper import graph_forward

    monkeypatch.setattr(graph_forward, "MAX_FORWARDS", 1)
    bench = GraphBench(tiny_qwen2_path)
    graphs = graph_forward.GraphForward(bench.decoder)
    graphs(bench.schedule((1, 56, 61)))
    assert graphs.fits(bench.schedule((1, 55, 61)))
    assert not graphs.fits(bench.schedule((1, 56, 57)))


@needs_cuda
def test_a_capture_survives_that_another_engine_is_dropped(
    tiny_qwen2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_wrapper import graph_forward

    gc.freeze()  # the collector then looks at few objects, and at all of these soon
    old, bench = GraphBench(tiny_qwen2_path), GraphBench(tiny_qwen2_path)
    dropped: list[Any] = [graph_forward.GraphForward(old.decoder)]
    dropped[0](old.schedule((1, 56, 57)))
    dropped.append(dropped)
    own_attention, attended = graph_forward.sparse_prefill, []

    def attend(*arguments: Any) -> torch.Tensor:
        nonlocal dropped
        attended.append(arguments)
        if len(attended) == NUM_LAYERS + 1:  # in a capture, behind a run that warms up
            dropped = []
            assert all(not each for each in [[] for _ in range(300_000)])  # so many objects start collections
        return own_attention(*arguments)

    schedule = bench.schedule((1, 56, 61))
    wanted = bench.eager(schedule)
    monkeypatch.setattr(graph_forward, "sparse_prefill", attend)
    try:
        actual = graph_forward.GraphForward(bench.decoder)(schedule)
    finally:
        gc.unfreeze()
    assert_close(actual, wanted)


@needs_cuda
def test_a_replay_never_waits_for_the_card(tiny_qwen2_path: Path) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = GraphBench(tiny_qwen2_path)
    graphs = GraphForward(bench.decoder)
    graphs(bench.schedule((1, 56, 61)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs(bench.schedule((1, 56, 60)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_a_card_reads_its_inputs_before_they_are_written_anew_though_another_is_current(tiny_qwen2_path: Path) -> None:
    runner = ModelRunner(tiny_qwen2_path, device="cuda:1")
    attach_pool(runner)
    prompts = [tokens_of(60, seed) for seed in (4, 5, 6)]
    blocks = [tuple(range(8 * number, 8 * number + 8)) for number in range(len(prompts))]
    for number, prompt in enumerate(prompts):
        runner.forward([SequenceSlice(number, 0, prompt[:-1], blocks[number])])
    last = [SequenceSlice(number, 59, prompt[-1:], blocks[number]) for number, prompt in enumerate(prompts)]
    wanted = [runner.forward([each]).cpu() for each in last]
    with torch.cuda.device(1):
        torch.cuda._sleep(200_000_000)
    found = [runner.forward([each]) for each in last]
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close([each.cpu() for each in found], wanted)
