"""What a check leaves, at fixed addresses and in graphs, equals the eager forward; graphs made ahead write nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.fused_layers import FusedRows
from engine_wrapper.layer_schedule import LayerSchedule, build_schedule
from engine_wrapper.sequence_work import SequenceSlice
from engine_wrapper.sparse_forward import SparseForward
from kernels.layout import KvGeometry
from semblend_trt.plan import SemanticKvPlan, SpanCheck
from semblend_trt.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (the extra `gpu`)")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

PlanMaker = Callable[..., SemanticKvPlan]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE, NUM_LAYERS, LENGTH, SPAN = 8, 3, 61, (6, 52)
TOLERANCE = 1e-4


class Bench:
    """One tiny model over a pool in which a prompt's own KV lies, changed at two positions above layer 0."""

    def __init__(self, path: Path, make_plan: PlanMaker, check_layer: int, dtype: torch.dtype = torch.float32) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        geometry = KvGeometry(NUM_LAYERS, config.num_key_value_heads, head_dim, BLOCK_SIZE)
        pool = torch.zeros(20, NUM_LAYERS, 2, geometry.row_elements, dtype=dtype, device=DEVICE)
        self.forward = SparseForward(model, pool, geometry, fused=True)
        generator = torch.Generator().manual_seed(4)
        prompt = tuple(torch.randint(0, 256, (LENGTH,), generator=generator).tolist())
        self.blocks = (3, 9, 1, 17, 0, 5, 12, 7)
        self.forward(build_schedule([SequenceSlice(1, 0, prompt, self.blocks)], NUM_LAYERS).to(DEVICE))
        for position in (20, 33):
            block, slot = self.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            rows = pool.view(20, NUM_LAYERS, 2, geometry.kv_heads, BLOCK_SIZE, head_dim)
            rows[block, :, :, :, slot] *= 2
        self.pool, self.donor = pool, pool.clone()
        plan = make_plan(
            prompt, [SPAN], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, check=SpanCheck(check_layer, 0.3)
        )
        piece = SequenceSlice(1, SPAN[1], prompt[SPAN[1] :], self.blocks, plan)
        self.schedule = build_schedule([piece], NUM_LAYERS).last_rows([LENGTH - SPAN[1]])

    def on_device(self) -> LayerSchedule:
        """The schedule, over the donor's KV again."""
        self.pool.copy_(self.donor)
        return self.schedule.to(DEVICE)


@pytest.mark.parametrize("check_layer", [0, NUM_LAYERS - 1])
def test_fixed_addresses_equal_the_eager_forward(
    tiny_qwen3_path: Path, make_plan: PlanMaker, interpret: Callable[[], None], check_layer: int
) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TRITON_INTERPRET", raising=False)
        bench = Bench(tiny_qwen3_path, make_plan, check_layer)
        decoder = bench.forward.fused
        assert decoder is not None
        wanted = bench.forward(bench.on_device())
        schedule = bench.on_device()
        check = schedule.check
        assert check is not None
        with torch.inference_mode():
            rows = FusedRows(decoder, schedule)
            for stage, layers in schedule.layers_of_stages(NUM_LAYERS):
                rows.enter(stage)
                for layer in layers:
                    rows.run(layer)
            rest, _ = check.decide(rows.compare(check, Ranks()))
            begun = rows.begun(check_layer, rest.stages[0].keep)
        # The hole in front, what was planted, and the suffix.
        assert len(begun.heads) == SPAN[0] + 2 + LENGTH - SPAN[1]
    interpret()
    from engine_wrapper.graph_forward import StaticInputs, run_rest, shape_of

    shape = shape_of(rest, decoder)
    inputs = StaticInputs(shape, 24, decoder.pool, decoder.geometry)
    with torch.inference_mode():
        room = begun.room_for(shape.rows)
        room.fill(begun)
        inputs.upload(rest)
        hidden = run_rest(decoder, shape, inputs, room)[: len(wanted)]
    torch.testing.assert_close(hidden, wanted, atol=TOLERANCE, rtol=0)


def test_inputs_without_writes_leave_the_pool_alone(
    tiny_qwen2_path: Path, make_plan: PlanMaker, interpret: Callable[[], None]
) -> None:
    bench = Bench(tiny_qwen2_path, make_plan, 1)
    decoder = bench.forward.fused
    assert decoder is not None
    before = bench.pool.clone()
    interpret()
    from engine_wrapper.graph_forward import StaticInputs, run_static, shape_of

    schedule = build_schedule([SequenceSlice(0, 11, (0,) * 5, (0, 0))], NUM_LAYERS).last_rows([5])
    shape = shape_of(schedule, decoder)
    inputs = StaticInputs(shape, 24, decoder.pool, decoder.geometry)
    with torch.inference_mode():
        inputs.upload(schedule, writes=False)
        assert run_static(decoder, shape, inputs)[0].isfinite().all()
        assert torch.equal(bench.pool, before)
        inputs.upload(schedule)
        run_static(decoder, shape, inputs)
        assert not torch.equal(bench.pool, before)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("check_layer", range(NUM_LAYERS))
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_replayed_graphs_equal_the_eager_forward(
    tiny_model_paths: dict[str, Path], make_plan: PlanMaker, family: str, check_layer: int, dtype: torch.dtype
) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = Bench(tiny_model_paths[family], make_plan, check_layer, dtype)
    assert bench.forward.fused is not None
    graphs = GraphForward(bench.forward.fused)
    wanted = bench.forward(bench.on_device())
    for _ in range(2):
        actual = bench.forward(bench.on_device(), graphs=graphs)
        assert ((actual - wanted).norm() / wanted.norm()).item() <= (1e-5 if dtype == torch.float32 else 1e-2)
    assert len(graphs) == 1


@needs_cuda
def test_hooks_keep_graphs_away(tiny_qwen2_path: Path, make_plan: PlanMaker) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = Bench(tiny_qwen2_path, make_plan, 1)
    assert bench.forward.fused is not None
    graphs, layers = GraphForward(bench.forward.fused), []
    bench.forward(bench.on_device(), after_layer=layers.append, graphs=graphs)
    assert layers == list(range(NUM_LAYERS))
    assert len(graphs) == 0


@needs_cuda
def test_graphs_made_ahead_serve_and_write_nothing(tiny_qwen2_path: Path, make_plan: PlanMaker) -> None:
    from engine_wrapper.graph_forward import GraphForward

    bench = Bench(tiny_qwen2_path, make_plan, 1)
    assert bench.forward.fused is not None
    wanted = bench.forward(bench.on_device())
    bench.on_device()
    graphs = GraphForward(bench.forward.fused)
    graphs.prepare([LENGTH, LENGTH], [1])
    assert torch.equal(bench.pool, bench.donor)
    made = len(graphs)
    assert made > 0
    actual = bench.forward(bench.on_device(), graphs=graphs)
    decode = build_schedule([SequenceSlice(1, LENGTH - 1, (3,), bench.blocks)], NUM_LAYERS).last_rows([1])
    graphs(decode)
    assert len(graphs) == made
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=0)
