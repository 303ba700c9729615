"""Plans in TensorRT-LLM's decoder give what they give in ours, beside any other requests of the batch."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.layer_schedule import schedule_of
from engine_wrapper.self_check import MIN_TOKENS
from engine_wrapper.sparse_forward import SparseForward
from engine_wrapper.token_schedule import SequenceSlice, works_of
from engine_wrapper.trtllm import planned_forward
from engine_wrapper.trtllm.planned_forward import PlannedForward, table_for
from kernels.layout import pool_view
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.plan import EngineMode, SpanCheck
from semblend_trt.pool_facts import PoolFacts
from semblend_trt.runtime import Runtime
from tests.engine_wrapper.trtllm.stand_ins import BLOCK, LlmRequest, executor_of
from tests.engine_wrapper.watching import watched

LAYERS = 3
SPANS = [(10, 30), (36, 58)]
TERMS = {
    "position_fix": {},
    "boundary": {"boundary": 2},
    "head": {"head": 5},
    "check keeps": {"check": SpanCheck(1, 1e9)},
    "check drops": {"check": SpanCheck(0, 0.0)},
    "check some": {"check": SpanCheck(1, largest_share=0.3)},
    "check in the last layer": {"check": SpanCheck(LAYERS - 1, largest_share=0.5)},
    "check below a boundary": {"check": SpanCheck(0, largest_share=0.5), "boundary": 2},
}


class Bench:
    """A stand-in executor with plans attached, and ours over the same weights and a pool of the same content."""

    def __init__(self, path, **options):
        self.path, facts = path, model_facts(path)
        self.executor = executor_of(path, None, **options)
        manager = self.executor.kv_cache_manager
        self.runtime = Runtime(pool=PoolFacts(manager.geometry, manager.pool.shape[0], torch.float32))
        self.decoder = self.executor.model_engine.model.model
        self.forward = PlannedForward(self.decoder, table_for(manager), self.runtime, manager.pool, facts, None)
        self.forward.install()

    def request(self, request_id, length):
        generator = torch.Generator().manual_seed(request_id)
        request = LlmRequest(request_id, torch.randint(0, 256, (length,), generator=generator).tolist())
        self.executor.kv_cache_manager.add_sequence(request)
        return request

    def slice(self, request, begin=0, plan=None):
        return SequenceSlice(request.request_id, begin, tuple(request.tokens[begin:]), tuple(request.blocks), plan)

    def run(self, *slices, contexts=None):
        """The engine's logits of each slice's last token; plans are pending meanwhile."""
        for each in slices:
            if each.plan is not None:
                self.runtime.active_plans.put(each.plan)
        sequences = [(each.request_id, each.begin, len(each.token_ids)) for each in slices]
        tokens = [token for each in slices for token in each.token_ids]
        return self.executor.forward(sequences, tokens, len(slices) if contexts is None else contexts)

    def prove(self):
        self.executor.prefill(self.request(99, 80))
        assert self.runtime.mode is EngineMode.WRAPPER

    def scatter(self, request, spans):
        """Random KV in the places of the spans, as a donor of another context would leave it."""
        view = pool_view(self.executor.kv_cache_manager.pool, self.executor.kv_cache_manager.geometry)
        generator = torch.Generator().manual_seed(7)
        for position in (each for start, end in spans for each in range(start, end)):
            cell = view[request.blocks[position // BLOCK], :, :, :, position % BLOCK]
            cell.copy_(torch.randn(cell.shape, generator=generator))

    def ours(self, *slices):
        """Logits of each slice's last token by our own forward, over a copy of the pool."""
        manager = self.executor.kv_cache_manager
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        forward = SparseForward(model, manager.pool.clone(), manager.geometry)
        works = [replace(work, outputs=1) for work in works_of(slices, LAYERS)]
        return forward.logits(forward(schedule_of(works, LAYERS)))


QWEN2 = ("qwen2", True, "1.2")
BENCHES = [QWEN2, ("llama", False, "main"), ("glm4_moe", True, "1.2"), ("smollm3", True, "main")]
BENCHES += [("gemma3_text", True, "main"), ("gemma3_text", False, "1.2")]


@pytest.fixture(params=BENCHES, ids=str)
def bench(request, tiny_model_paths):
    family, fused, style = request.param
    return Bench(tiny_model_paths[family], fused=fused, style=style)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("bench", [QWEN2], indirect=True)
@pytest.mark.parametrize(
    ("sequences", "contexts", "proves"),
    [
        ([(1, 0, MIN_TOKENS)], 1, True),
        ([(1, 0, MIN_TOKENS), (2, 20, 1)], 1, True),
        ([(1, 0, MIN_TOKENS - 1)], 1, False),
        ([(1, 8, MIN_TOKENS)], 1, False),
        ([(1, 0, MIN_TOKENS)], 0, False),
    ],
)
def test_only_a_long_prompt_from_position_0_proves_that_plans_can_run(bench, sequences, contexts, proves):
    for request_id in (1, 2):
        bench.request(request_id, 80)
    bench.executor.forward(sequences, list(range(sum(length for _, _, length in sequences))), contexts)
    assert bench.runtime.mode is (EngineMode.WRAPPER if proves else EngineMode.STOCK)
    assert not bench.runtime.faults


@pytest.mark.parametrize("bench", [QWEN2], indirect=True)
@pytest.mark.parametrize("what", ["hidden rows", "KV of layer 1", "counts positions in another way"])
def test_what_differs_is_named(bench, caplog, what):
    own, request = bench.forward._stock, bench.request(1, 72)

    def otherwise(**options):
        hidden = own(**options)
        if what == "hidden rows":
            return hidden * 1.5
        if what == "KV of layer 1":
            bench.executor.kv_cache_manager.pool[request.blocks[0], 1] *= 1.5
        else:
            options["position_ids"] += 2
        return hidden

    bench.forward._stock = otherwise
    bench.executor.prefill(request)
    assert what in caplog.text
    assert bench.runtime.faults == {"self_check": 1}


# With 49, from the first token of a span to the last one's, and one behind it, all fit into one forward.
ROWS = (None, 49, 16)
# Every two of bench, terms and rows meet.
MIXED = [(each, key, ROWS[(i + j) % 3]) for i, each in enumerate(BENCHES) for j, key in enumerate(TERMS)]


@pytest.mark.promise("engines", "By TensorRT-LLM's contract windows are reused...")
@pytest.mark.known_defect(12)
@pytest.mark.parametrize(("bench", "terms", "max_rows"), MIXED, indirect=["bench"], ids=str)
def test_a_plan_in_a_mixed_batch_equals_our_own_forward(bench, make_plan, monkeypatch, terms, max_rows):
    bench.prove()
    rows = watched(monkeypatch, planned_forward, "PlannedRows", lambda _, schedule, *__: len(schedule.token_ids))
    planned, cold, running = bench.request(1, 70), bench.request(2, 33), bench.request(3, 21)
    bench.executor.prefill(running)
    running.tokens.append(77)
    bench.scatter(planned, SPANS)
    plan = make_plan(planned.tokens, SPANS, prefix_end=60, shift=3, **TERMS[terms])
    slices = (bench.slice(planned, 60, plan), bench.slice(cold), bench.slice(running, 21))
    expected = bench.ours(*slices)
    bench.forward._max_rows = max_rows
    rows.clear()
    assert_close(bench.run(*slices, contexts=2), expected)
    assert (len(rows) == 1) == (max_rows is None)
    assert max_rows is None or max(rows) <= max_rows
    assert len(bench.runtime.active_plans) == 0
    assert len(bench.runtime.evidence) == (1 if plan.is_checked else 0)


@pytest.mark.known_defect(11)
def test_an_exact_prefix_in_front_of_the_plan_is_read_and_not_written(bench, make_plan):
    bench.prove()
    donor, request = bench.request(1, 70), bench.request(2, 70)
    request.tokens = list(donor.tokens)
    cold = bench.executor.prefill(donor)
    pool = bench.executor.kv_cache_manager.pool
    pool[request.blocks[:8]] = pool[donor.blocks[:8]]
    shared = pool[request.blocks[:2]].clone()
    plan = make_plan(request.tokens, [(20, 60)], request_id=2, num_computed=2 * BLOCK, boundary=1)
    assert_close(bench.run(bench.slice(request, 60, plan))[0], cold)
    assert torch.equal(pool[request.blocks[:2]], shared)


@pytest.mark.parametrize("bench", [QWEN2, ("qwen2", True, "main")], indirect=True)
@pytest.mark.parametrize("what", ["another beginning", "rows that fail", "other blocks", "nothing"])
def test_what_a_plan_cannot_do_is_computed_in_the_same_step(bench, make_plan, monkeypatch, what):
    bench.prove()
    request = bench.request(1, 70)
    bench.scatter(request, SPANS)
    plan = make_plan(request.tokens, SPANS, prefix_end=58, shift=3, check=SpanCheck(1, 1e9))
    plan = plan.with_target_blocks(tuple(request.blocks[1:9] if what == "other blocks" else request.blocks[:8]))
    cold = bench.ours(bench.slice(request))
    if what == "rows that fail":
        monkeypatch.setattr(planned_forward.PlannedRows, "_decide", lambda rows: rows.missing)
    bench.runtime.active_plans.put(replace(plan, matched_tokens=60) if what == "another beginning" else plan)
    logits = bench.executor.forward([(1, 58, 12)], request.tokens[58:], 1)
    assert torch.allclose(logits, cold, atol=1e-3) == (what != "nothing")
    fails = what in ("another beginning", "rows that fail")
    assert bench.runtime.faults == ({"planned_forward": 1} if fails else {})
    assert bench.runtime.refusal == ("planned_forward" if fails else None)
    assert bench.runtime.active_plans.withholds(1) == (what == "nothing")
    assert not bench.runtime.failed


@pytest.mark.parametrize("bench", [QWEN2], indirect=True)
def test_what_cannot_be_computed_either_is_named_and_never_published(bench, make_plan):
    bench.prove()
    request = bench.request(1, 70)
    bench.runtime.active_plans.put(make_plan(request.tokens, SPANS))
    metadata = SimpleNamespace(request_ids=[1], num_contexts=1, seq_lens=torch.tensor([12]))
    with pytest.raises(TypeError):  # by the engine's own forward
        bench.decoder(attn_metadata=metadata, input_ids=None, inputs_embeds=torch.zeros(12, 64))
    assert bench.runtime.failed == {1}
    assert bench.runtime.active_plans.publishable(1, 70) == 0


def _wrong_rotation(bench):
    for layer in bench.decoder.layers:
        layer.self_attn.rope_fusion = not layer.self_attn.rope_fusion


def _sees_all(bench):
    mlp = bench.decoder.layers[1].source.mlp
    mlp.register_forward_hook(lambda module, inputs, output: output + output.mean(1, keepdim=True))


def _asks(wish, bench):
    bench.decoder.layers[2].self_attn.asks[wish] = 128


def _cannot_be_left(bench):
    layer = bench.decoder.layers[0]
    own = layer.forward

    def forward(**options):
        try:
            return own(**options)
        except Exception:
            return options["hidden_states"], options["hidden_states"]

    layer.forward = forward


@pytest.mark.promise(
    "policies",
    "Before the first plan the wrapper computes the engine's first cold prompt again, and gives the decoder back "
    "when results differ",
)
@pytest.mark.parametrize(
    "spoil",
    [
        _wrong_rotation,
        _sees_all,
        partial(_asks, "attention_window_size"),
        partial(_asks, "mrope_rotary_cos_sin"),
        partial(_asks, "mrope_position_deltas"),
        partial(_asks, "relative_attention_bias"),
        _cannot_be_left,
    ],
    ids=["rotation", "rows mix", "window", "mrope", "mrope deltas", "bias", "cannot be left"],
)
def test_a_decoder_that_computes_otherwise_is_given_back_as_it_was(bench, spoil):
    decoder = bench.decoder
    spoil(bench)
    logits = bench.executor.prefill(bench.request(1, 80))
    assert torch.isfinite(logits).all(), "the engine's own forward goes on"
    assert bench.runtime.mode is EngineMode.STOCK
    assert bench.runtime.faults == {"self_check": 1}
    assert "forward" not in vars(decoder)
    for layer in decoder.layers:
        assert not layer._forward_pre_hooks
        assert "forward" not in vars(layer.self_attn.attn)
