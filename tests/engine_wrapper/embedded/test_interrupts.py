"""Ctrl-C ends the requests of a call at a point where the engine is whole, and the engine serves on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from engine_wrapper.embedded.llm import SamplingParams, interrupts_held

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[*range(1, 60)], [*range(100, 130)]]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def held(reached: list[int], interrupts: int) -> None:
    with interrupts_held(), interrupts_held():
        for number in range(interrupts):
            interrupt()
            reached.append(number)


@pytest.mark.parametrize(("interrupts", "expected"), [(1, [0]), (2, [0])])
def test_the_first_interrupt_waits_for_the_end_and_the_second_does_not(interrupts: int, expected: list[int]) -> None:
    reached: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        held(reached, interrupts)
    assert reached == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_hold_nothing() -> None:
    handlers = []

    def look() -> None:
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert handlers == [signal.default_int_handler]


class Interrupting:
    """A forward that calls `act` the `number`-th time, at its end."""

    def __init__(self, llm, act, number) -> None:
        self._runner, self._act, self._left = llm.executor.model_runner, act, number
        self._forward = self._runner.forward
        self._runner.forward = self

    def __call__(self, *arguments, **named):
        result = self._forward(*arguments, **named)
        self._left -= 1
        if self._left == 0:
            self._act()
        return result


def raises() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("act", [interrupt, raises])
@pytest.mark.parametrize("fields", [{}, {"contract": "1.1"}, {"contract": "1.2", "disable_overlap_scheduler": False}])
def test_the_engine_serves_on(make_shelf_llm, make_llm, fields, act, number) -> None:
    expected = tokens_of(make_llm().generate(PROMPTS, EIGHT))
    llm, _ = make_shelf_llm(max_num_tokens=32, **fields)
    free = llm.block_manager.num_free_blocks
    Interrupting(llm, act, number)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, EIGHT)
    llm.settle()
    assert llm.executor.num_unfinished == 0
    assert llm.block_manager.num_free_blocks == free
    assert tokens_of(llm.generate(PROMPTS, EIGHT)) == expected


def test_another_callers_request_goes_on(make_llm) -> None:
    expected = tokens_of(make_llm().generate(PROMPTS[:1], EIGHT))
    llm = make_llm()
    stream = llm.generate_async(PROMPTS[0], EIGHT)
    next(stream)
    Interrupting(llm, interrupt, 1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], EIGHT)
    *_, last = stream
    assert tokens_of([last]) == expected


def test_a_request_is_not_left_behind_when_it_is_interrupted_on_its_way_in(make_llm, monkeypatch) -> None:
    llm = make_llm()
    enqueue = llm.executor.enqueue

    def interrupted(requests) -> None:
        enqueue(requests)
        interrupt()

    monkeypatch.setattr(llm.executor, "enqueue", interrupted)
    for serve in (llm.generate, llm.generate_async):
        with pytest.raises(KeyboardInterrupt):
            serve(PROMPTS[0], EIGHT)
    assert llm.executor.num_unfinished == 0


CHILD = """
import sys
from engine_wrapper.embedded.llm import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu")
params, prompt = SamplingParams(max_tokens=8, ignore_eos=True), list(range(1, 60))
expected = llm.generate(prompt, params)[0].outputs[0].token_ids
runner = llm.executor.model_runner
forward = runner.forward
def waiting(*arguments, **named):
    print("forward", flush=True)
    sys.stdin.readline()
    return forward(*arguments, **named)
runner.forward = waiting
try:
    llm.generate(prompt, params)
except KeyboardInterrupt:
    runner.forward = forward
    print("same" if llm.generate(prompt, params)[0].outputs[0].token_ids == expected else "other", flush=True)
"""


def test_a_real_signal_inside_a_forward(tiny_qwen2_path) -> None:
    command = [sys.executable, "-c", CHILD, str(tiny_qwen2_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "forward\n"
        os.kill(child.pid, signal.SIGINT)
        output, _ = child.communicate("\n", timeout=300)
    assert (child.returncode, output) == (0, "same\n")
