"""The worker obeys the metadata, refuses pools it does not know, and never blocks or holds what it was not given."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from engine_wrapper.embedded.block_manager import LayerGroup, cache_layout
from engine_wrapper.embedded.llm_args import LlmArgs
from semblend_trt.connector import SemBlendKvConnectorWorker
from semblend_trt.connector.requests import RequestProgress, SemBlendConnectorMetadata
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import OffloadCommands, OffloadEventKind, SavedDonor, SaveIntent
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.plan import EngineMode, PlanSpan
from semblend_trt.runtime import Weights, runtime_for
from tests.random_models import save_tiny_model
from tests.semblend_trt.held_donors import SaverGate, held_in, held_kv, saved, whole
from tests.semblend_trt.plans import plan_of

LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 3, 2, 16, 8
ROW = KV_HEADS * BLOCK * HEAD_DIM


@pytest.fixture
def args(tiny_qwen2_path):
    return LlmArgs(model=tiny_qwen2_path)


@pytest.fixture
def worker(args):
    with closing(built(args)) as worker:
        yield worker


def pool(dtype=torch.float32, block=BLOCK):
    torch.manual_seed(0)
    return torch.randn(32, LAYERS, 2, KV_HEADS * block * HEAD_DIM).to(dtype)


def begin(worker, **fields):
    """An iteration whose forward fails: no save is waited for."""
    worker.bind_connector_meta(SemBlendConnectorMetadata(**fields))
    worker.start_load_kv(None)


def step(worker, **fields):
    begin(worker, **fields)
    worker.wait_for_save(None)


def settle(worker):
    """What the metadata asks for has been done."""
    worker.get_finished([], [])
    worker.saver.drain()


def follow(worker, request_id, blocks, written, max_tokens=100, tier=Tier.HOST, **commands):
    intent = SaveIntent(request_id, f"donor-{request_id}", max_tokens, tier)
    progress = (RequestProgress(request_id, blocks, written, True),)
    step(worker, followed=(request_id,), commands=OffloadCommands(saves=[intent], **commands), progress=progress)


def built(args, caches=None):
    worker = SemBlendKvConnectorWorker(args)
    worker.register_kv_caches(pool() if caches is None else caches)
    return worker


def reuse(mode=EngineMode.WRAPPER):
    span = PlanSpan("donor-1", 0, 4, 16)
    return plan_of(span, request_id=7, prompt=30, computed=4, blocks=(20, 21, 22, 23), mode=mode)


@pytest.mark.promise("engines", "Other models, RoPE types, windows, MLA,...")
@pytest.mark.known_defect(25, 26)
@pytest.mark.parametrize(
    ("layers", "dtype", "refusal"),
    [
        (4, torch.float32, "pool_layout"),
        (LAYERS, torch.int8, "pool_layout"),
        (LAYERS, torch.float8_e4m3fn, "kv_scales"),  # nothing tells its scales
    ],
)
def test_unknown_pool_is_a_refusal(args, layers, dtype, refusal):
    worker = built(args, torch.zeros(4, layers, 2, ROW, dtype=dtype))
    runtime = runtime_for(args)
    assert (runtime.pool, runtime.refusal) == (None, refusal)
    assert worker.get_finished([], []) == ([], [])


@pytest.mark.parametrize(("block", "refusal"), [(32, None), (33, "window_below_block")])
def test_a_window_shorter_than_a_block_is_a_refusal(tmp_path, block, refusal):
    args = LlmArgs(model=str(save_tiny_model("gpt_oss", tmp_path)))
    assert built(args, torch.zeros(4, 3, 2, 2 * block * 16)).facts.windows == (32, None, 32)
    runtime = runtime_for(args)
    assert (runtime.pool is None, runtime.refusal) == (refusal is not None, refusal)


@pytest.mark.promise("engines", "By TensorRT-LLM's contract windows are reused...")
@pytest.mark.parametrize(
    ("groups", "windows", "max_seq_len", "refusal"),
    [
        *(([(0, 1, 2)], windows, length, None) for windows, length in (([None], None), ([64], 64))),
        *(([(0, 1, 2)], [64], length, "attention_window") for length in (65, None)),
        ([(0, 2), (1,)], [64, None], 128, "attention_window"),
        ([(0, 2), (1,)], [None, None], 128, "layer_groups"),
        (None, None, 128, "pool_layout"),  # it cannot be read
    ],
)
def test_a_layout_whose_kv_is_not_kept_in_one_pool_is_refused(
    tiny_qwen2_path, groups, windows, max_seq_len, refusal, caplog
):
    args = LlmArgs(model=str(tiny_qwen2_path), contract="1.4", max_seq_len=max_seq_len)
    layout = groups and replace(cache_layout(pool(), BLOCK), groups=tuple(map(LayerGroup, groups, windows)))
    SemBlendKvConnectorWorker(args).register_kv_cache_layout(layout)
    runtime = runtime_for(args)
    assert (runtime.pool is None, runtime.refusal) == (refusal is not None, refusal)
    assert ("windows of [64] tokens" in caplog.text) == (refusal == "attention_window")


def blocks_of(whole):
    """[blocks, layers, 2, kv_heads, block_size, head_dim]"""
    return whole.unflatten(3, (KV_HEADS, BLOCK, HEAD_DIM))


def kv_of(worker):
    """What is kept of request 1, [layers, 2, kv_heads, tokens, head_dim]."""
    return whole(held_kv(worker.store.host, "donor-1"))


def test_save_holds_the_written_tokens_of_the_requests_blocks(worker, args):
    follow(worker, 1, (3, 5), 12)
    step(worker, progress=(RequestProgress(1, (9,), 20, False),))
    step(worker, grown=(1, 99))  # 99 is not followed
    assert saved(worker, 1) == [1]
    kv, blocks = kv_of(worker), blocks_of(pool())
    assert kv.shape == (LAYERS, 2, KV_HEADS, 21, HEAD_DIM)
    assert torch.equal(kv[:, :, :, 16:21], blocks[9, :, :, :, :5])
    assert torch.equal(kv[:, :, :, 8:16], blocks[5])
    assert list(runtime_for(args).saved) == [SavedDonor("donor-1", 21)]


@pytest.mark.parametrize(
    ("blocks", "written", "most", "kept"),
    [
        ((3, 5), 16, 10, 10),
        ((3, 4, 4, 5), 32, 100, 16),
        *((blocks, 16, 100, 8) for blocks in ((3, 3), (3, 1 << 80))),
        ((3, 4, -1 << 80), 24, 100, 16),
        ((3,), 30, 100, 0),  # one block cannot hold 30 tokens
    ],
)
def test_a_save_ends_with_its_exact_part_or_where_a_block_cannot_be_the_requests(
    worker, args, blocks, written, most, kept
):
    follow(worker, 1, blocks, written, max_tokens=most)
    assert saved(worker, 1) == [1]
    (told,) = runtime_for(args).saved
    assert (told.tokens, told.error is None) == (kept, kept > 0)


@pytest.fixture(params=["1.2", "1.4"])
def early(tiny_qwen2_path, request):
    """A worker of an engine that gives a request's blocks to others while they are saved."""
    with closing(built(LlmArgs(model=tiny_qwen2_path, contract=request.param))) as worker:
        yield worker


@pytest.mark.promise(
    "donors",
    "Blocks that the engine gives to others are copied first, in stream order, and a donor is cut to that room",
)
def test_what_others_write_during_a_save_is_no_part_of_the_donor(early):
    blocks = blocks_of(pool())
    follow(early, 1, (3, 5), 12)
    with SaverGate(early):
        assert early.get_finished([1], []) == ([], [])
        early.loader._pool[[3, 5]] = torch.nan
    assert saved(early, 99) == [99]
    assert early.get_finished([], []) == ([1], [])
    kv = kv_of(early)
    assert torch.equal(kv[:, :, :, :8], blocks[3])
    assert torch.equal(kv[:, :, :, 8:], blocks[5, :, :, :, :4])


def test_one_ended_save_is_told_a_call_where_others_would_be_lost(early, worker):
    for each, answers in ((early, [[99], [1], [2], []]), (worker, [[99, 1, 2], [], [], []])):
        for request_id, block in ((1, 3), (2, 5)):
            follow(each, request_id, (block,), 8)
        with SaverGate(each):
            each.get_finished([1, 2], [])
        assert [each.get_finished(ended, [])[0] for ended in ([99], [], [], [])] == answers


@pytest.mark.promise("donors", "Blocks count as held where the...")
@pytest.mark.parametrize(
    ("contract", "has_layout", "held"),
    [("1.2", False, False), ("1.4", False, False), ("1.4", True, True), ("embedded", False, True)],
)
def test_blocks_are_held_where_the_engine_shows_it(tiny_qwen2_path, contract, has_layout, held):
    args = LlmArgs(model=tiny_qwen2_path, contract=contract)
    with closing(SemBlendKvConnectorWorker(args)) as worker:
        if has_layout:
            worker.register_kv_cache_layout(cache_layout(pool(), BLOCK))
        else:
            worker.register_kv_caches(pool())
        assert runtime_for(args).pool.holds_saved_blocks == held
        assert (worker.saver._snapshots is None) == held


def test_what_a_failed_forward_was_to_write_is_not_kept_later_either(worker, args):
    begin(worker, followed=(1,), progress=(RequestProgress(1, (3, 4), 12, True),))
    step(worker, grown=(1,), commands=OffloadCommands(saves=[SaveIntent(1, "donor-1", 100)]))
    assert not runtime_for(args).is_forward_open
    saved(worker, 1)
    assert "has failed" in runtime_for(args).saved[0].error
    assert not held_in(worker.store)


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_forward_was_to_read_is_placed_behind_it_unless_it_has_failed(worker, args, fails):
    asked, readiness = [], runtime_for(args).readiness
    begin(worker)
    readiness.expect(asked.append(layer) or (layer + 1, None) for layer in range(4))
    if fails:
        begin(worker)
    else:
        worker.wait_for_save(None)
    assert not readiness.is_arriving
    assert asked == ([0] if fails else [0, 1, 2, 3])


def test_unknown_and_forgotten_requests_are_returned_at_once(worker):
    step(worker, followed=(1,), progress=(RequestProgress(1, (3,), 8, True),))
    step(worker, forgotten=(1,))
    assert worker.get_finished([1, 99], [5]) == ([1, 99], [5])
    assert not held_in(worker.store)


def test_metadata_is_applied_once(worker):
    # Since 1.3rc an engine without a schedule binds nothing, and the old metadata stays bound.
    follow(worker, 1, (3,), 8)
    step(worker, progress=(RequestProgress(1, (4,), 16, False),))
    worker.start_load_kv(None)
    step(worker, progress=(RequestProgress(1, (5,), 24, False),))
    saved(worker, 1)
    kv, blocks = kv_of(worker), blocks_of(pool())
    assert kv.shape[3] == 24
    assert torch.equal(kv[:, :, :, 16:], blocks[5])


def test_a_second_pool_is_refused(worker, args):
    follow(worker, 1, (3,), 8)
    worker.register_kv_caches(pool())
    assert runtime_for(args).refusal == "pool_layout"
    assert worker.get_finished([1], []) == ([1], [])
    assert not held_in(worker.store)


def test_missing_donor_lets_the_wrapper_compute(worker, args):
    step(worker, plans=(reuse(),))
    assert torch.equal(worker.loader._pool, pool())
    plan = runtime_for(args).active_plans.take(7)
    assert (plan.spans, list(plan.holes), list(runtime_for(args).failed_loads)) == ((), [range(4, 20)], [7])


def test_a_look_up_has_checked_the_weights_for_one_forward_alone(worker, args):
    follow(worker, 1, (0, 1, 2), 24)
    worker.get_finished([1], [])
    settle(worker)
    runtime, linear = runtime_for(args), torch.nn.Linear(2, 2)
    runtime.weights, runtime.are_weights_checked = Weights(linear), True
    for changes, failed in ((0, []), (1, [7])):
        begin(worker, plans=(reuse(),))
        assert (runtime.weights_changes, list(runtime.failed_loads)) == (changes, failed)
        linear.reset_parameters()
    for fields, changes in (({"grown": (1,)}, 1), ({"followed": (2,)}, 2), ({}, 3)):
        step(worker, **fields)
        worker.get_finished([], [])
        linear.reset_parameters()
        assert runtime.weights_changes == changes


@pytest.mark.promise("reuse", "A donor that is lost costs...")
def test_missing_donor_on_a_stock_engine_is_an_error_not_a_wrong_token(worker):
    with pytest.raises(DonorUnavailableError):
        step(worker, plans=(reuse(EngineMode.STOCK),))
    assert torch.equal(worker.loader._pool, pool())


def test_a_load_that_raises_leaves_no_promotion_untold(two_tiers, args):
    """The catalog keeps a promoted donor where it is, and its room on the card taken, until it hears of it."""
    with pytest.raises(DonorUnavailableError):
        step(two_tiers, plans=(reuse(EngineMode.STOCK),), commands=OffloadCommands(promotions=["donor-2"]))
    settle(two_tiers)
    (event,) = runtime_for(args).offload_events
    assert (event.kind, event.donor_id) == (OffloadEventKind.PROMOTE_FAILED, "donor-2")


@pytest.fixture
def two_tiers(args, monkeypatch):
    """A worker with an arena of three blocks."""
    monkeypatch.setenv("SEMBLEND_DEVICE_BYTES", str(3 * LAYERS * 2 * ROW * 4))
    with closing(built(args)) as worker:
        yield worker


def test_offloads_make_room_for_the_save_of_the_same_metadata(two_tiers, args):
    follow(two_tiers, 1, (3, 5), 16, tier=Tier.DEVICE)
    saved(two_tiers, 1)
    follow(two_tiers, 2, (6, 7, 8), 24, tier=Tier.DEVICE, offloads=["donor-1", "donor-unknown"])
    saved(two_tiers, 2)
    assert ("donor-1" in two_tiers.store.host, "donor-2" in two_tiers.store.device) == (True, True)
    assert [each.error for each in runtime_for(args).saved] == [None, None]


def test_what_is_dropped_is_not_offloaded(two_tiers):
    follow(two_tiers, 1, (3, 5), 16, tier=Tier.DEVICE)
    saved(two_tiers, 1)
    step(two_tiers, commands=OffloadCommands(drops=["donor-1"], offloads=["donor-1"]))
    settle(two_tiers)
    assert not held_in(two_tiers.store)


def test_a_save_that_is_asked_for_before_the_forward_has_ended_is_refused(worker, args):
    follow(worker, 1, (3, 4), 8)
    follow(worker, 2, (5,), 8)
    begin(worker, grown=(1,))
    assert runtime_for(args).is_forward_open
    assert (saved(worker, 1), saved(worker, 2)) == ([1], [2])
    failed, whole = runtime_for(args).saved
    assert "has failed" in failed.error
    assert (failed.tokens, whole.tokens, whole.error) == (0, 8, None)
