from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_wrapper.embedded.batch_scheduler import BatchScheduler
from engine_wrapper.embedded.block_manager import BlockManager
from engine_wrapper.embedded.llm_args import KvCacheConfig, LlmArgs
from engine_wrapper.embedded.request import LlmRequest, LlmRequestState
from engine_wrapper.embedded.sampling import SamplingParams

BLOCK = 4


def request(request_id, prompt_len, max_new_tokens=2):
    prompt = [request_id * 1000 + position for position in range(prompt_len)]
    return LlmRequest(request_id, prompt, SamplingParams(), max_new_tokens=max_new_tokens)


class Engine:
    """Scheduler and blocks, with a forward that only moves positions."""

    def __init__(self, *, blocks=64, batch=4, rows=16, chunked=True):
        args = LlmArgs(
            model="m",
            max_batch_size=batch,
            max_num_tokens=rows,
            enable_chunked_prefill=chunked,
            kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK),
        )
        self.blocks = BlockManager(blocks, args.kv_cache_config, lambda source, target: None)
        self.active, self.waiting = {}, deque()
        self.scheduler = BatchScheduler(args, self.blocks, self.active, self.waiting)

    def add(self, *requests):
        self.waiting.extend(requests)
        return self

    def step(self):
        """Returns [(request id, begin, rows)] of the iteration, in its order."""
        ran = []
        for each in self.scheduler.schedule().requests:
            if each.is_in_context:
                ran.append((each.request_id, each.context_current_position, each.context_chunk_size))
                each.context_current_position = each.chunk_end
                if each.context_remaining_length:
                    continue
                each.state = LlmRequestState.GENERATION_IN_PROGRESS
            else:
                ran.append((each.request_id, each.get_num_tokens() - 1, 1))
            each.add_new_token(0)
            if each.num_generated == each.max_new_tokens:
                self.blocks.publish(each.request_id, each.tokens(0, each.num_written_tokens))
                self.blocks.release(each.request_id)
                del self.active[each.request_id]
        return ran


def test_context_comes_before_generation():
    engine = Engine().add(request(1, 3))
    assert engine.step() == [(1, 0, 3)]
    engine.add(request(2, 5))
    assert engine.step() == [(2, 0, 5), (1, 3, 1)]


def test_a_long_prompt_runs_in_chunks_that_end_on_block_boundaries():
    engine = Engine(rows=10).add(request(1, 21))
    assert [engine.step() for _ in range(3)] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 5)]]


def test_generation_has_its_rows_before_any_prompt():
    engine = Engine(rows=6).add(request(1, 3, 9), request(2, 3, 9))
    engine.step()
    engine.add(request(3, 20))
    assert engine.step() == [(3, 0, 4), (1, 3, 1), (2, 3, 1)]


def test_a_budget_below_a_block_starts_no_chunk():
    engine = Engine(rows=6).add(request(1, 3, 9), request(2, 20))
    assert engine.step() == [(1, 0, 3)]
    assert len(engine.waiting) == 1
    assert engine.step() == [(2, 0, 4), (1, 3, 1)]


def test_nothing_follows_a_chunk_that_is_not_the_last():
    engine = Engine(rows=10).add(request(1, 21), request(2, 2))
    assert engine.step() == [(1, 0, 8)]


def test_without_chunked_prefill_a_prompt_waits_for_the_whole_budget():
    engine = Engine(rows=10, chunked=False).add(request(1, 6), request(2, 6))
    assert engine.step() == [(1, 0, 6)]
    assert engine.step() == [(2, 0, 6), (1, 6, 1)]


def test_a_cached_prefix_costs_no_budget():
    engine = Engine(rows=10)
    first = request(1, 16, 1)
    engine.add(first)
    while engine.active or engine.waiting:
        engine.step()
    again = LlmRequest(2, first.tokens(0, 16), SamplingParams(), max_new_tokens=1)
    engine.add(again)
    assert engine.step() == [(2, 15, 1)]
    assert again.cached_tokens == 15


def test_the_batch_has_a_largest_size():
    engine = Engine(batch=2).add(request(1, 3), request(2, 3), request(3, 3))
    assert engine.step() == [(1, 0, 3), (2, 0, 3)]
    assert engine.step() == [(1, 3, 1), (2, 3, 1)]
    assert engine.step() == [(3, 0, 3)]


def test_a_request_waits_until_its_blocks_are_certain():
    engine = Engine(blocks=4).add(request(1, 8, 4), request(2, 8, 4))
    assert engine.step() == [(1, 0, 8)]
    assert engine.step() == [(1, 8, 1)]
    engine.step()
    engine.step()
    assert engine.step() == [(2, 0, 8)]


def test_a_request_being_loaded_is_not_scheduled_and_keeps_its_place():
    engine = Engine(batch=1).add(request(1, 3), request(2, 3))
    engine.step()
    engine.active[1].state = LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
    assert engine.step() == []


@pytest.mark.parametrize("position", range(12, 16))
def test_a_chunk_cut_anew_still_ends_on_a_boundary(position):
    engine = Engine(rows=9).add(request(1, 40))
    engine.step()
    running = engine.active[1]
    running.context_current_position = position
    engine.scheduler.resize_chunk(running)
    assert running.context_chunk_size >= 1
    assert (position + running.context_chunk_size) % BLOCK == 0


@settings(max_examples=60)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=8),
    rows=st.integers(4, 24),
    blocks=st.integers(9, 30),
    chunked=st.booleans(),
)
def test_every_request_runs_once_through_and_in_bounds(shapes, rows, blocks, chunked):
    if not chunked:
        shapes = [(min(length, rows), new) for length, new in shapes]
    engine = Engine(blocks=blocks, rows=rows, chunked=chunked)
    engine.add(*(request(index + 1, *shape) for index, shape in enumerate(shapes)))
    positions = dict.fromkeys(range(1, len(shapes) + 1), 0)
    for _ in range(500):
        ran = engine.step()
        assert sum(count for *_, count in ran) <= rows
        for request_id, begin, count in ran:
            prompt_len = shapes[request_id - 1][0]
            assert begin == positions[request_id]
            assert count == 1 or begin + count == prompt_len or (begin + count) % BLOCK == 0
            positions[request_id] += count
        if not engine.active and not engine.waiting:
            break
    assert positions == {index + 1: length + new - 1 for index, (length, new) in enumerate(shapes)}
    assert engine.blocks.num_free_blocks == blocks
