"""vLLM's steps as our halves read them, in the words of its two model runners."""

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from engine_wrapper.vllm.scheduler import Steps

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


def test_blocks_are_gathered_from_step_to_step():
    steps = Steps(NUMBERS.__getitem__)
    told, found = steps.read(step({"a": 32, "b": 16}, [new("a", [1, 2]), new("b", [3], computed=16)]))
    assert [each.request_id for each in told.new_requests] == [7, 8]
    assert (found["b"].begin, found["b"].tokens, found["b"].block_ids) == (16, 16, (3,))
    for computed, gained, blocks in ((32, [4], (1, 2, 4)), (33, None, (1, 2, 4))):
        told, found = steps.read(step({"a": 1}, **known("a", computed, gained)))
        assert [each.request_id for each in told.cached_requests] == [7]
        assert (found["a"].begin, found["a"].block_ids) == (computed, blocks)


def test_a_request_that_comes_back_has_its_new_blocks_only():
    """The V1 runner is told of it among those that it knows, the V2 runner as of a new one."""
    for back in (
        step({"a": 32}, **known("a", 0, [5, 6], resumed_req_ids={"a"})),
        step({"a": 32}, [new("a", [5, 6])]),
    ):
        steps = Steps(NUMBERS.__getitem__)
        steps.read(step({"a": 32}, [new("a", [1, 2])]))
        told, found = steps.read(back)
        assert [(each.request_id, each.new_block_ids) for each in told.new_requests] == [(7, [5, 6])]
        assert not told.cached_requests
        assert found["a"].block_ids == (5, 6)
