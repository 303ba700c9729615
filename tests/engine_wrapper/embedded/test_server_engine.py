"""The engine's thread: many requests at once, aborts, refusals, and an end that leaves nobody waiting."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from engine_wrapper.embedded.llm import LLM, SamplingParams
from engine_wrapper.embedded.server import EngineThread
from semblend_trt.errors import CapacityError
from semblend_trt.fleet.router.serving import RequestRefusedError

PROMPTS = [list(range(start, start + 20 + start)) for start in (1, 5, 9)]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm(tiny_qwen2_path):
    with LLM(tiny_qwen2_path, dtype="float32", max_seq_len=256) as llm:
        yield llm


@pytest.fixture
def engine(llm):
    engine = EngineThread(llm, max_requests=4)
    yield engine
    engine.close()


async def outputs_of(engine, prompt, params=GREEDY, *, streaming=True):
    return [output async for output in engine.outputs(prompt, params, None, streaming=streaming)]


def test_requests_together_say_what_they_say_alone(tiny_qwen2_path, engine):
    async def together():
        return await asyncio.gather(*(outputs_of(engine, prompt) for prompt in PROMPTS))

    with LLM(tiny_qwen2_path, dtype="float32", max_seq_len=256) as alone:
        expected = [alone.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    streams = asyncio.run(together())
    assert [stream[-1].outputs[0].token_ids for stream in streams] == expected
    assert [[len(output.outputs[0].token_ids) for output in stream] for stream in streams] == [[1, 2, 3, 4, 5, 6]] * 3
    assert engine.running == 0


def test_without_streaming_only_the_end_is_told(engine):
    (output,) = asyncio.run(outputs_of(engine, PROMPTS[0], streaming=False))
    assert output.finished
    assert len(output.outputs[0].token_ids) == 6


def test_a_request_that_is_left_is_aborted(llm, engine):
    async def leave():
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        async with aclosing(engine.outputs(PROMPTS[0], long, None, streaming=True)) as outputs:
            first = await anext(outputs)
        # The next request is taken behind the abort.
        await outputs_of(engine, PROMPTS[1])
        return first

    first = asyncio.run(leave())
    assert not first.finished
    assert (engine.running, llm.executor.num_unfinished) == (0, 0)


def test_what_the_engine_cannot_take_is_refused(engine):
    async def too_long():
        with pytest.raises(CapacityError, match="exceeds max_seq_len 256"):
            await outputs_of(engine, [1] * 300)

    asyncio.run(too_long())
    assert engine.failure is None


def test_no_more_run_than_may(engine):
    async def crowd():
        return await asyncio.gather(*(outputs_of(engine, PROMPTS[0]) for _ in range(6)), return_exceptions=True)

    ended = asyncio.run(crowd())
    refused = [each for each in ended if isinstance(each, RequestRefusedError)]
    assert len(refused) == 2
    assert "4 requests are running or waiting" in str(refused[0])


def test_an_engine_that_fails_tells_all_who_wait_and_takes_nobody(llm, engine, monkeypatch):
    def broken(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm.executor.model_runner, "forward", broken)

    async def ask():
        return await asyncio.gather(*(outputs_of(engine, prompt) for prompt in PROMPTS), return_exceptions=True)

    for ended in (*asyncio.run(ask()), *asyncio.run(ask())):
        assert isinstance(ended, RequestRefusedError)
        assert (ended.reason, str(ended)) == ("engine_stopped", "the engine has stopped: out of memory")
    assert engine.failure == "out of memory"


def test_closing_ends_what_runs(engine):
    async def close():
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        running = asyncio.ensure_future(outputs_of(engine, PROMPTS[0], long))
        while not engine.running:
            await asyncio.sleep(0)
        engine.close()
        with pytest.raises(RequestRefusedError, match="it was shut down"):
            await running

    asyncio.run(close())
