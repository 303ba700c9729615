"""Defects of public connectors, each by the situation that triggers it."""

import threading
from traceback import extract_stack
from unittest import mock

import numpy as np
import pytest
import torch

from engine_wrapper.embedded.block_manager import RootKey
from engine_wrapper.sparse_forward import SparseForward
from kernels.kv_move import Move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from kernels.rope import RopeRotation
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.transfer import load as loader
from semblend_trt.transfer import staging
from tests.builders.engine import BLOCK, DOCUMENT, DONOR, GREEDY, PREFILL, SHIFTED, Engines, serve, text
from tests.kernels.builders import interpret

STOCK = "semblend_trt.connector"


@pytest.fixture
def engine(tiny_qwen2_path, tmp_path):
    """Builds engines, with the wrapper and policy position_fix unless other ones are asked for."""
    engines = Engines(tmp_path / "audit.jsonl", model=tiny_qwen2_path, dtype="float32", device="cpu")
    yield lambda *module, **settings: engines(*module, **{"POLICY": "position_fix", "METRICS": "0", **settings})
    engines.shutdown()


@pytest.fixture
def copied(monkeypatch):
    """Says how many tokens each move of a load has had."""
    spy = mock.Mock(wraps=loader.prepared)
    monkeypatch.setattr(loader, "prepared", spy)
    return lambda: [move.length for call in spy.call_args_list for move in call.args[0]]


@pytest.mark.promise("reuse", "A document is found from token ids alone, wherever it is in prompt and donor")
@pytest.mark.promise(
    "reuse", "A stock engine reuses identical text from position 0 only, and copies nothing that it cannot use"
)
@pytest.mark.known_defect(1, 2)
@pytest.mark.parametrize(("module", "reused"), [("engine_wrapper.connector", 200), (STOCK, 0)])
def test_shifted_document_saves_prefill_or_copies_nothing(engine, copied, module, reused):
    llm = engine(module, EMBEDDER="off")  # the connector is given token ids alone
    serve(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, sum(copied())) == (reused, reused)
    assert output.computed_tokens == len(SHIFTED) - reused


@pytest.mark.promise("reuse", "The engine's exact prefix wins, and is never overwritten")
@pytest.mark.known_defect(9)
def test_blocks_of_the_engines_prefix_stay_bitwise(engine):
    """The engine has the head already; a donor that holds head and document may write the document only."""
    head = text(30, 4 * BLOCK)
    llm = engine(MIN_SPAN=len(head) + 1)  # the head alone is computed
    serve(llm, text(31, 21) + head + DOCUMENT)
    serve(llm, head + text(32, 30))
    prompt = head + DOCUMENT + text(33, 20)
    shared = [node.block_id for node in llm.block_manager._tree.match(RootKey(), prompt).nodes]
    before = llm.executor.pool[shared].clone()
    output = serve(llm, prompt)
    assert (len(shared), output.cached_tokens, output.reused_tokens) == (4, 4 * BLOCK, len(DOCUMENT))
    assert torch.equal(llm.executor.pool[shared], before)


@pytest.mark.promise("policies", "`SEMBLEND_POLICY=off` and `SEMBLEND_ENABLED=0` keep and find nothing")
@pytest.mark.known_defect(15)
@pytest.mark.parametrize(
    "variables",
    [
        *({name: 1} for name in ("DISCOVERY_ONLY", "STRICT_PREFIX_BOUNDARY", "EXACT_MATERIALIZATION_ONLY")),
        *({"POLICY": policy} for policy in ("off", "exact", "verified")),
        *({"MIN_REUSE_RATIO": 0.95}, {"MIN_SPAN": 201}, {"LOOKUP_DEADLINE_MS": 0.001}),
    ],
    ids=str,
)
def test_what_is_not_promised_is_not_copied(engine, copied, variables):
    llm = engine(**variables)
    serve(llm, DONOR)
    output = serve(llm, SHIFTED)
    assert (output.reused_tokens, output.computed_tokens, copied()) == (0, len(SHIFTED), [])


@pytest.mark.promise("donors", "The end of a request only enqueues; a save waits for nothing")
@pytest.mark.known_defect(18)
def test_the_end_of_a_request_only_enqueues(engine, monkeypatch):
    indexing, copying = [], set()
    update, move, thread = SpanIndex._update, staging.kv_move, threading.current_thread
    monkeypatch.setattr(SpanIndex, "_update", lambda *given: indexing.append(str(extract_stack())) or update(*given))
    monkeypatch.setattr(staging, "kv_move", lambda *given: copying.add(thread()) or move(*given))
    llm = engine()
    serve(llm, DONOR)
    serve(llm, DONOR[100:] + DONOR)
    assert {"request_finished" in each for each in indexing} == {False}
    assert copying
    assert thread() not in copying


@pytest.mark.known_defect(24)
def test_the_last_generated_token_is_no_part_of_the_donor(engine):
    """Its KV was never written: the row that would write it has not run."""
    llm = engine()
    answer = serve(llm, DONOR, GREEDY).outputs[0].token_ids
    output = serve(llm, text(6, 30) + DONOR + answer + text(7, 20))
    assert output.reused_tokens == len(DONOR) + len(answer) - 1


FACTS = [
    ("the board did not approve the offer that was made", "the board did approve the offer that was made"),
    ("on Tuesday Alice paid Bob what she owed him for it", "on Tuesday Bob paid Alice what he owed her for it"),
    ("from the store 12 lamps and 40 chairs were taken", "from the store 40 lamps and 12 chairs were taken"),
]


@pytest.mark.promise("reuse", "Only equal tokens are reused: text that differs by one token is computed")
@pytest.mark.known_defect(29)
@pytest.mark.parametrize(("fact", "other", "min_span"), [*((*each, 32) for each in FACTS), (*FACTS[0], 64)])
def test_like_text_never_authorises_kv(engine, monkeypatch, fact, other, min_span):
    """Negation, exchanged roles and numbers, and paraphrases: what differs by one token is computed."""
    llm = engine(MIN_SPAN=min_span, MIN_REUSE_RATIO=0, MIN_DONOR_TOKENS=32)
    donor, prompt = (list(f"{head} {text}".encode()) for head, text in (("As we heard,", fact), ("Note that", other)))
    load = mock.Mock(wraps=llm.connector_worker.loader.load)
    monkeypatch.setattr(llm.connector_worker.loader, "load", load)
    serve(llm, donor)
    output = serve(llm, prompt)
    spans = [span for call in load.call_args_list for plan in call.args[0] for span in plan.spans]
    for span in spans:
        assert donor[span.donor_start : span.donor_end] == prompt[span.target_start : span.target_end]
    assert output.reused_tokens == sum(span.length for span in spans)
    if min_span == 64:
        assert output.reused_tokens == 0


@pytest.mark.promise("reuse", "The model is given the request's own tokens, never a donor's")
@pytest.mark.known_defect(30)
def test_the_model_is_given_the_requests_own_tokens(engine):
    llm = engine()
    serve(llm, list(b"Answer with yes, whatever you are asked: ") + DOCUMENT + list(b"Is it so?"))
    prompt = list(b"Answer with no, and give your reasons in a few words: ") + DOCUMENT + list(b"Was it so?")
    with mock.patch.object(SparseForward, "__call__", autospec=True, side_effect=SparseForward.__call__) as forward:
        output = serve(llm, prompt, PREFILL)
    schedules = [call.args[1] for call in forward.call_args_list]
    rows = [row for each in schedules for row in zip(each.positions.tolist(), each.token_ids.tolist(), strict=True)]
    assert output.reused_tokens >= len(DOCUMENT)
    assert output.prompt_token_ids == prompt
    assert len(rows) == output.computed_tokens
    assert all(token == prompt[position] for position, token in rows)


@pytest.mark.promise("reuse", "Unrelated prompts are served from no...")
@pytest.mark.known_defect(37)
def test_a_miss_costs_a_lookup_and_nothing_else(engine, copied, tmp_path, monkeypatch):
    llm = engine(DISK_BYTES=1 << 24, DISK_PATH=tmp_path)
    lookup, fetched = llm.connector_scheduler._lookup, []
    plan = mock.Mock(wraps=lookup.planner.plan)
    monkeypatch.setattr(lookup.planner, "plan", plan)
    monkeypatch.setattr(llm.connector_worker.transfers, "fetch", fetched.append)
    for seed in range(8):
        output = serve(llm, text(100 + seed, 120))
        assert (output.reused_tokens, output.computed_tokens) == (0, 120)
    assert (plan.call_count, copied(), fetched) == (8, [], [])
    assert lookup.donors.catalog.stats().leases == 0


@pytest.mark.known_defect(16)
@pytest.mark.parametrize(("spans", "tokens"), [(1, 40), (8, 2000)])
def test_a_plan_of_any_size_is_one_launch(monkeypatch, spans, tokens):
    pytest.importorskip("triton", reason="skipped: Triton is not installed")
    if not torch.cuda.is_available():
        interpret(monkeypatch)  # as the kernels' tests import it, whichever comes first
    from kernels.kv_move import triton_move

    launches = []
    monkeypatch.setattr(triton_move, "launch", lambda _, grid, *__, **___: launches.append(grid[0]))
    geometry = KvGeometry(num_layers=28, kv_heads=1, head_dim=16, block_size=16)
    donor = ContiguousKv(torch.zeros(28, 2, 1, tokens, 16))
    blocks = -(-spans * (tokens + 5) // 16)
    target = PagedKv(torch.zeros(blocks, 28, 2, geometry.row_elements), torch.arange(blocks), geometry)
    moves = [Move(donor, 0, number * (tokens + 5), tokens, turn=37) for number in range(spans)]
    triton_move.prepared(moves, target, RopeRotation(tuple(0.1**power for power in range(8)), 16))(range(28), 0)
    assert len(launches) == 1
    assert launches[0] > 0


@pytest.mark.known_defect(36)
def test_ten_thousand_donors_come_and_go_in_the_memory_of_ten_thousand():
    """Donors enter and leave one by one; the next ones take their room, and none is renumbered."""
    count, length = 10_000, 128
    random = np.random.default_rng(0)
    index = SpanIndex()
    tokens = random.integers(0, 32_000, (2 * count, length), dtype=np.int32)
    for number in range(count):
        index.add("space", f"donor-{number}", tokens[number])
    full = index.used_bytes()
    assert full <= 8 * count * length
    for number in range(count, 2 * count):
        assert index.remove(f"donor-{number - count}")
        index.add("space", f"donor-{number}", tokens[number])
    assert len(index._donors) == count
    assert index.used_bytes() <= 1.5 * full
    for number in (count, 2 * count - 1, *random.integers(count, 2 * count, 20)):
        (run,) = index.find("space", tokens[number]).runs
        assert (run.donor_id, run.length) == (f"donor-{number}", length)
    assert index.find("space", tokens[0]).runs == []
