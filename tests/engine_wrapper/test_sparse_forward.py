"""The sparse forward equals the plain Hugging Face forward wherever nothing approximate is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.layer_schedule import build_schedule
from engine_wrapper.sequence_work import SequenceSlice
from engine_wrapper.sparse_forward import SparseForward
from kernels.layout import KvGeometry, pool_view
from semblend_trt.plan import PlanKind, SemanticKvPlan

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
BLOCK_SIZE = 8
BLOCKS_A_REQUEST = 12
NUM_LAYERS = 3
TOLERANCE = 1e-4

PlanMaker = Callable[..., SemanticKvPlan]


class Bench:
    """One tiny model twice: plain, and ours over a pool whose unwritten KV is NaN."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.device = device
        self.plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.plain.to(device)
        self.model.to(device)
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.geometry = KvGeometry(NUM_LAYERS, config.num_key_value_heads, head_dim, BLOCK_SIZE)
        shape = (4 * BLOCKS_A_REQUEST, NUM_LAYERS, 2, self.geometry.row_elements)
        self.pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.forward = SparseForward(self.model, self.pool, self.geometry)
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(5)).tolist()
        self._blocks = [tuple(order[i::4]) for i in range(4)]

    def blocks(self, request_id: int) -> tuple[int, ...]:
        return self._blocks[request_id - 1]

    def clear(self) -> None:
        self.pool.fill_(float("nan"))

    def slice(self, request_id: int, tokens: tuple[int, ...], begin: int = 0, end: int | None = None) -> SequenceSlice:
        return SequenceSlice(request_id, begin, tokens[begin:end], self.blocks(request_id))

    def planned(self, plan: SemanticKvPlan, end: int | None = None) -> SequenceSlice:
        piece = self.slice(plan.request_id, tuple(plan.prompt_token_ids.tolist()), plan.prefix_end, end)
        return replace(piece, plan=plan)

    def run(self, *slices: SequenceSlice) -> list[torch.Tensor]:
        """Logits of each slice, [tokens, vocabulary]."""
        hidden = self.forward(build_schedule(slices, NUM_LAYERS, self.device))
        return list(self.forward.logits(hidden).split([len(piece.token_ids) for piece in slices]))

    @torch.inference_mode()
    def reference(self, tokens: tuple[int, ...]) -> torch.Tensor:
        logits: torch.Tensor = self.plain(torch.tensor([tokens], device=self.device)).logits[0].float()
        return logits

    def kv(self, request_id: int) -> torch.Tensor:
        """A copy of a request's KV: [layers, 2, kv_heads, positions, head_dim]."""
        blocks = pool_view(self.pool, self.geometry)[list(self.blocks(request_id))]
        return blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).clone()

    def place(self, request_id: int, kv: torch.Tensor, start: int, end: int) -> None:
        """Writes positions start..end-1 of `kv` into the request's blocks."""
        view = pool_view(self.pool, self.geometry)
        for position in range(start, end):
            block = self.blocks(request_id)[position // BLOCK_SIZE]
            view[block, :, :, :, position % BLOCK_SIZE] = kv[:, :, :, position]


@pytest.fixture(scope="module", params=FAMILIES)
def shared_bench(request: pytest.FixtureRequest, tiny_model_paths: dict[str, Path]) -> Bench:
    return Bench(tiny_model_paths[request.param])


@pytest.fixture
def bench(shared_bench: Bench) -> Bench:
    shared_bench.clear()
    return shared_bench


@pytest.fixture
def qwen2(tiny_qwen2_path: Path) -> Bench:
    return Bench(tiny_qwen2_path)


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE  # NaN fails as well


@contextmanager
def rows_by_layer(model: Any) -> Iterator[list[int]]:
    """Counts the rows that really enter each layer."""
    counts = [0] * NUM_LAYERS

    def counting(layer: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            counts[layer] += args[0].shape[1]

        return hook

    handles = [layer.register_forward_pre_hook(counting(index)) for index, layer in enumerate(model.model.layers)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


# -- without plans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 61])
def test_a_prompt_equals_the_plain_forward(bench: Bench, length: int) -> None:
    tokens = tokens_of(length)
    assert_close(bench.run(bench.slice(1, tokens))[0], bench.reference(tokens))


def test_a_batch_equals_single_runs(bench: Bench) -> None:
    prompts = {request_id: tokens_of(length, length) for request_id, length in ((1, 33), (2, 1), (3, 58), (4, 16))}
    together = bench.run(*(bench.slice(request_id, tokens) for request_id, tokens in prompts.items()))
    for (request_id, tokens), logits in zip(prompts.items(), together, strict=True):
        assert_close(logits, bench.reference(tokens))
        bench.clear()
        assert_close(bench.run(bench.slice(request_id, tokens))[0], logits)


def test_chunks_and_decode_steps_equal_one_prompt(bench: Bench) -> None:
    first, second = tokens_of(50, 1), tokens_of(40, 2)
    parts: list[torch.Tensor] = []
    bench.run(bench.slice(2, second, 0, 37))
    # Chunks of one request run beside decode steps of another.
    decoded = []
    for step, (begin, end) in enumerate([(0, 13), (13, 32), (32, 33)]):
        chunk, step_logits = bench.run(bench.slice(1, first, begin, end), bench.slice(2, second, 37 + step, 38 + step))
        parts.append(chunk)
        decoded.append(step_logits)
    parts += [bench.run(bench.slice(1, first, position, position + 1))[0] for position in range(33, 50)]
    assert_close(torch.cat(parts), bench.reference(first))
    assert_close(torch.cat(decoded), bench.reference(second)[37:])


# -- with plans -------------------------------------------------------------------------------------------------------


def own_kv(bench: Bench, tokens: tuple[int, ...], request_id: int = 1) -> torch.Tensor:
    """The KV that a cold run of `tokens` writes; the pool is NaN again afterwards."""
    bench.run(bench.slice(request_id, tokens))
    kv = bench.kv(request_id)
    bench.clear()
    return kv


@pytest.mark.parametrize("boundary", range(NUM_LAYERS + 1))
@pytest.mark.parametrize("spans", [[(0, 24)], [(5, 17), (17, 23), (30, 41)], [(8, 40)]])
def test_a_plan_with_the_requests_own_kv_equals_the_plain_forward(
    bench: Bench, make_plan: PlanMaker, boundary: int, spans: list[tuple[int, int]]
) -> None:
    """NaN outside the spans: nothing but placed and computed KV is ever read."""
    tokens = tokens_of(50)
    kv = own_kv(bench, tokens)
    for start, end in spans:
        bench.place(1, kv, start, end)
    plan = make_plan(tokens, spans, num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=boundary)
    logits = bench.run(bench.planned(plan))[0]
    assert_close(logits, bench.reference(tokens)[plan.prefix_end :])
    torch.testing.assert_close(bench.kv(1)[:, :, :, :50], kv[:, :, :, :50], atol=TOLERANCE, rtol=0)


def test_the_highest_boundary_never_reads_the_donor(bench: Bench, make_plan: PlanMaker) -> None:
    tokens = tokens_of(50)
    plan = make_plan(tokens, [(3, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=NUM_LAYERS)
    assert_close(bench.run(bench.planned(plan))[0], bench.reference(tokens)[40:])


def test_a_plan_that_lost_its_spans_never_reads_the_donor(bench: Bench, make_plan: PlanMaker) -> None:
    tokens = tokens_of(50)
    plan = make_plan(tokens, [(3, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=1)
    logits = bench.run(bench.planned(plan.without_spans("donor_unavailable")))[0]
    assert_close(logits, bench.reference(tokens)[40:])


@pytest.mark.parametrize("boundary", range(NUM_LAYERS))
def test_donor_kv_stays_from_the_boundary_on(qwen2: Bench, make_plan: PlanMaker, boundary: int) -> None:
    """Below the boundary the request's own KV replaces the donor's; above it the donor's is what the suffix reads."""
    tokens, other = tokens_of(50), tokens_of(50, seed=9)
    own, donor = own_kv(qwen2, tokens), own_kv(qwen2, other)
    qwen2.place(1, donor, 4, 40)
    plan = make_plan(tokens, [(4, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=boundary)
    logits = qwen2.run(qwen2.planned(plan))[0]
    kv = qwen2.kv(1)[:, :, :, 4:40]
    torch.testing.assert_close(kv[:boundary], own[:boundary, :, :, 4:40], atol=TOLERANCE, rtol=0)
    assert torch.equal(kv[boundary:], donor[boundary:, :, :, 4:40])
    assert logits.isfinite().all()
    assert (logits - qwen2.reference(tokens)[40:]).abs().max() > 0.1


@pytest.mark.parametrize("boundary", range(NUM_LAYERS + 1))
def test_the_exact_prefix_is_read_and_never_written(bench: Bench, make_plan: PlanMaker, boundary: int) -> None:
    tokens = tokens_of(60)
    kv = own_kv(bench, tokens)
    bench.place(1, kv, 0, 16)
    bench.place(1, kv, 20, 45)
    prefix = bench.kv(1)[:, :, :, :16]
    plan = make_plan(
        tokens, [(20, 45)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=boundary, num_computed=16
    )
    assert_close(bench.run(bench.planned(plan))[0], bench.reference(tokens)[45:])
    assert torch.equal(bench.kv(1)[:, :, :, :16], prefix)


def test_chunks_and_decode_steps_follow_a_plan(bench: Bench, make_plan: PlanMaker) -> None:
    tokens = tokens_of(60)
    bench.place(1, own_kv(bench, tokens), 6, 30)
    plan = make_plan(tokens, [(6, 30)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=1)
    parts = bench.run(bench.planned(plan, end=37))
    parts += bench.run(bench.slice(1, tokens, 37, 55))
    parts += [bench.run(bench.slice(1, tokens, position, position + 1))[0] for position in range(55, 60)]
    assert_close(torch.cat(parts), bench.reference(tokens)[30:])


def test_requests_with_different_plans_share_one_forward(bench: Bench, make_plan: PlanMaker) -> None:
    first, second, third, fourth = (tokens_of(length, length) for length in (50, 61, 40, 33))
    kvs = [own_kv(bench, first, 1), own_kv(bench, second, 2)]
    bench.run(bench.slice(4, fourth, 0, 32))
    bench.place(1, kvs[0], 5, 31)
    bench.place(2, kvs[1], 0, 16)
    bench.place(2, kvs[1], 20, 48)
    plans = [
        make_plan(first, [(5, 31)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=2),
        make_plan(
            second, [(20, 48)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, request_id=2, num_computed=16, boundary=1
        ),
    ]
    with rows_by_layer(bench.model) as counts:
        logits = bench.run(
            bench.planned(plans[0]),
            bench.slice(3, third),
            bench.planned(plans[1], end=57),
            bench.slice(4, fourth, 32, 33),
        )
    for actual, expected in zip(
        logits,
        (
            bench.reference(first)[31:],
            bench.reference(third),
            bench.reference(second)[48:57],
            bench.reference(fourth)[32:],
        ),
        strict=True,
    ):
        assert_close(actual, expected)
    plain = 40 + 1
    assert counts == [50 + 41 + plain, 50 + 13 + plain, 24 + 13 + plain]


@pytest.mark.known_defect(12)
@pytest.mark.parametrize("boundary", range(NUM_LAYERS + 1))
def test_dropped_rows_are_not_computed(qwen2: Bench, make_plan: PlanMaker, boundary: int) -> None:
    tokens = tokens_of(50)
    qwen2.place(1, own_kv(qwen2, tokens), 5, 40)
    plan = make_plan(tokens, [(5, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=boundary)
    with rows_by_layer(qwen2.model) as counts:
        qwen2.run(qwen2.planned(plan))
    assert counts == [50] * boundary + [15] * (NUM_LAYERS - boundary)


def test_a_discovery_plan_equals_no_plan(qwen2: Bench, make_plan: PlanMaker) -> None:
    tokens = tokens_of(30)
    plan = make_plan(
        tokens, [(4, 20)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, kind=PlanKind.DISCOVERY_ONLY, prefix_end=0
    )
    assert_close(qwen2.run(qwen2.planned(plan))[0], qwen2.reference(tokens))


# -- around the forward -----------------------------------------------------------------------------------------------


def test_hooks_surround_every_layer(qwen2: Bench) -> None:
    calls: list[tuple[str, int]] = []
    schedule = build_schedule([qwen2.slice(1, tokens_of(9))], NUM_LAYERS)
    with rows_by_layer(qwen2.model) as counts:
        qwen2.forward(
            schedule,
            before_layer=lambda layer: calls.append((f"before, {counts[layer]} rows", layer)),
            after_layer=lambda layer: calls.append((f"after, {counts[layer]} rows", layer)),
        )
    expected = [(when, layer) for layer in range(NUM_LAYERS) for when in ("before, 0 rows", "after, 9 rows")]
    assert calls == expected


def test_the_model_itself_still_runs_plainly(bench: Bench) -> None:
    """A direct call of the model gets Transformers' own attention, padding mask and cache included."""
    tokens = tokens_of(20)
    with torch.inference_mode():
        assert_close(bench.model(torch.tensor([tokens])).logits[0], bench.reference(tokens))
        padded = torch.tensor([(0, 0, 0, *tokens)])
        mask = torch.tensor([[0, 0, 0, *([1] * 20)]])
        positions = torch.tensor([[0, 0, 0, *range(20)]])
        logits = bench.model(padded, attention_mask=mask, position_ids=positions).logits[0, 3:]
        assert_close(logits, bench.reference(tokens))
        generated = bench.model.generate(torch.tensor([tokens]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated[0, 20] == bench.reference(tokens)[-1].argmax()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("boundary", range(NUM_LAYERS + 1))
def test_a_batch_with_a_plan_on_cuda(
    tiny_model_paths: dict[str, Path], make_plan: PlanMaker, family: str, boundary: int
) -> None:
    bench = Bench(tiny_model_paths[family], device="cuda")
    tokens, other = tokens_of(50), tokens_of(20, 1)
    bench.place(1, own_kv(bench, tokens), 5, 40)
    plan = make_plan(tokens, [(5, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=boundary)
    planned, plain = bench.run(bench.planned(plan), bench.slice(2, other))
    assert_close(planned, bench.reference(tokens)[40:])
    assert_close(plain, bench.reference(other))


def test_half_precision_stays_close_to_full(tiny_qwen2_path: Path, make_plan: PlanMaker) -> None:
    tokens = tokens_of(50)
    half = Bench(tiny_qwen2_path, torch.bfloat16)
    half.place(1, own_kv(half, tokens), 5, 40)
    plan = make_plan(tokens, [(5, 40)], num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, boundary=1)
    logits, reference = half.run(half.planned(plan))[0], half.reference(tokens)[40:]
    assert logits.dtype == torch.float32
    assert (logits - reference).norm() <= 0.05 * reference.norm()
