"""Which requests run in an iteration, and how many of their tokens: the scheduler over real blocks."""

from collections import deque

import pytest

from engine_wrapper.embedded.batch_scheduler import BatchScheduler, line_up
from engine_wrapper.embedded.block_manager import BlockManager
from engine_wrapper.embedded.llm_args import KvCacheConfig, LlmArgs
from engine_wrapper.embedded.request import LlmRequest, LlmRequestState, SamplingParams

BLOCK = 4


def request(request_id, prompt_len, max_new_tokens=2, priority=0):
    prompt = [request_id * 1000 + position for position in range(prompt_len)]
    return LlmRequest(request_id, prompt, SamplingParams(), max_new_tokens=max_new_tokens, priority=priority)


class Engine:
    """Scheduler and blocks, with a forward that only moves positions. Requests are given as (prompt, new tokens)."""

    def __init__(self, *shapes, blocks=64, batch=4, rows=16, threshold=0):
        args = LlmArgs(
            model="m",
            max_batch_size=batch,
            max_num_tokens=rows,
            long_prefill_token_threshold=threshold,
            kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK),
        )
        self.blocks = BlockManager(blocks, args.kv_cache_config, lambda source, target: None)
        self.active, self.waiting = {}, deque(request(index, *shape) for index, shape in enumerate(shapes, start=1))
        self.scheduler = BatchScheduler(args, self.blocks, self.active, self.waiting)

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


@pytest.mark.promise("donors", "In the embedded engine a document waits while a request waits or runs")
def test_what_has_a_higher_number_waits_for_all_that_has_a_lower_one():
    engine = Engine((3, 1))
    for request_id, priority in ((2, 1), (3, 1), (4, 0)):
        line_up(engine.waiting, request(request_id, 3, 2, priority))
    assert [engine.step() for _ in range(2)] == [[(1, 0, 3), (4, 0, 3)], [(4, 3, 1)]]
    engine.waiting.popleft()
    assert engine.step() == [(3, 0, 3)]
    line_up(engine.waiting, request(5, 3, 1))
    line_up(engine.waiting, request(2, 3, 1, 1), first=True)
    assert [each.request_id for each in engine.waiting] == [5, 2]
    assert (engine.step(), engine.step()) == ([(5, 0, 3), (3, 3, 1)], [(2, 0, 3)])
