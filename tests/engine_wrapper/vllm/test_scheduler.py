"""vLLM's steps as the halves read them, and what its block pool publishes of a request that has approximate KV."""

from inspect import signature

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from engine_wrapper.vllm import scheduler
from engine_wrapper.vllm.hooks import guard_publication
from engine_wrapper.vllm.scheduler import PublicationGuard, RequestView, Steps
from semblend_trt.policy import BROKEN_PROFILES, COLD, EXACT_ONLY
from tests.builders.vllm import request

SIZE = 16


def hashed(name):
    init_none_hash(sha256)
    return request(name, 4 * SIZE, block_hasher=get_request_block_hasher(SIZE, sha256))


def guarded():
    pool, guard = BlockPool(num_gpu_blocks=12, enable_caching=True, hash_block_size=SIZE), PublicationGuard()
    guard_publication(pool, guard.full, guard.partly)
    return pool, guard


def published(blocks):
    return [block.block_hash is not None for block in blocks]


@pytest.mark.promise("engines", "Approximate blocks stay out of vLLM's...")
@pytest.mark.every_version
def test_blocks_behind_the_exact_ones_are_not_published_until_the_request_has_ended():
    (pool, guard), asked, other = guarded(), hashed("a"), hashed("b")
    guard.exact_tokens["a"] = 2 * SIZE + 5
    own, others = pool.get_new_blocks(4), pool.get_new_blocks(4)
    for first, end in ((0, 1), (1, 3), (3, 4)):
        pool.cache_full_blocks(asked, own, first, end, SIZE, 0)
        pool.cache_full_blocks(other, others, first, end, SIZE, kv_cache_group_id=0)
    assert (published(own), published(others)) == ([True, True, False, False], [True] * 4)
    del guard.exact_tokens["a"]
    pool.cache_full_blocks(asked, own, 2, 4, SIZE, 0)
    assert published(own) == [True] * 4


@pytest.mark.every_version
@pytest.mark.skipif(
    "block_mask" not in signature(BlockPool.cache_full_blocks).parameters, reason="this version leaves no block out"
)
def test_a_mask_of_blocks_is_cut_with_them():
    pool, guard = guarded()
    own = pool.get_new_blocks(4)
    guard.exact_tokens["a"] = 3 * SIZE
    pool.cache_full_blocks(hashed("a"), own, 0, 4, SIZE, 0, block_mask=[True, False, True, True])
    assert published(own) == [True, False, True, False]


@pytest.mark.every_version
def test_no_part_of_a_block_is_published():
    pool, guard = guarded()
    own, another = pool.get_new_blocks(2)
    guard.exact_tokens["a"] = 4 * SIZE
    pool.cache_partial_block(hashed("a"), own, 3 * SIZE, 0, 2 * SIZE)
    pool.cache_partial_block(hashed("b"), another, 3 * SIZE, 0, 2 * SIZE)
    assert published([own, another]) == [False, True]


@pytest.mark.every_version
def test_a_pool_is_left_as_it_was_found():
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=SIZE)
    before = set(vars(pool))
    guard_publication(pool, print, print)()
    assert set(vars(pool)) == before
    with pytest.raises(AttributeError):
        guard_publication(object(), print, print)


def test_without_a_guard_only_text_that_stands_where_it_stood_is_reused(engine, monkeypatch):
    donor, moved = list(range(10, 510)), [*range(900, 970), *range(10, 510)]
    cold = engine(None, enable_prefix_caching=False).ask(moved).tokens
    monkeypatch.setattr(scheduler, "guard_publication", lambda _, *own: guard_publication(object(), *own))
    served = engine("position_fix")
    served.ask(donor)
    served.emptied()
    assert served.ask(donor).cached > 400
    answer = served.ask(moved)
    assert (answer.cached, answer.tokens) == (0, cold)


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        (None, (False, False, [])),
        (7, (False, False, [])),
        ({EXACT_ONLY: 1, COLD: "yes", BROKEN_PROFILES: "one"}, (False, False, [])),
        ({EXACT_ONLY: True, COLD: True, BROKEN_PROFILES: ["one"]}, (True, True, ["one"])),
    ],
)
def test_a_request_asks_by_values_of_the_right_kind_alone(asked, read):
    given = hashed("a")
    given.kv_transfer_params = asked
    view = RequestView(7, given)
    assert (view.exact_only, view.cold, view.broken_profiles) == read


NUMBERS = {"a": 7, "b": 8}


def step(counts, new=None, **cached):
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs, output.num_scheduled_tokens = new or [], counts
    fields = {"resumed_req_ids": set(), "new_token_ids": [], "all_token_ids": {}, "num_output_tokens": []}
    output.scheduled_cached_reqs = CachedRequestData(
        **{"req_ids": [], "new_block_ids": [], "num_computed_tokens": [], **fields, **cached}
    )
    return output


def new(name, block_ids, computed=0):
    return NewRequestData(
        req_id=name,
        prompt_token_ids=np.ones(64, dtype=np.int32),
        mm_features=[],
        sampling_params=SamplingParams(),
        pooling_params=None,
        block_ids=(block_ids,),
        num_computed_tokens=computed,
        lora_request=None,
    )


def known(name, computed, block_ids, **more):
    gained = None if block_ids is None else (block_ids,)
    return {"req_ids": [name], "num_computed_tokens": [computed], "new_block_ids": [gained], **more}


def test_blocks_are_gathered_for_steps_that_begin_a_request():
    steps = Steps(NUMBERS.__getitem__)
    told, found = steps.read(step({"a": 32, "b": 16}, [new("a", [1, 2]), new("b", [3], computed=16)]))
    assert [each.request_id for each in told.new_requests] == [7, 8]
    assert (found["b"].begin, found["b"].tokens, found["b"].block_ids) == (16, 16, (3,))
    for computed, gained, begins, blocks in ((32, [4], [], (1,)), (33, None, [new("b", [5])], (1, 2, 4))):
        told, found = steps.read(step({"a": 1, "b": 1}, begins, **known("a", computed, gained)))
        assert [each.request_id for each in told.cached_requests] == [7]
        assert (found["a"].begin, found["a"].block_ids) == (computed, blocks)


def test_a_request_that_comes_back_has_its_new_blocks_only():
    """The V1 runner is told of it among those that it knows, the V2 runner as of a new one."""
    for back in (step({"a": 32}, **known("a", 0, [5, 6], resumed_req_ids={"a"})), step({"a": 32}, [new("a", [5, 6])])):
        steps = Steps(NUMBERS.__getitem__)
        steps.read(step({"a": 32}, [new("a", [1, 2])]))
        told, found = steps.read(back)
        assert [(each.request_id, each.new_block_ids) for each in told.new_requests] == [(7, [5, 6])]
        assert not told.cached_requests
        assert found["a"].block_ids == (5, 6)
