"""Donors on disk outlive vLLM, and what was running when it ended is none of them."""

import multiprocessing
import os
from pathlib import Path

import pytest
from vllm import SamplingParams

from semblend_trt.donors.disk_tier import FOLDER
from tests.builders.vllm import WHOLE, cold_answers, random_tokens, serving, transfer

FIRST = list(range(10, 110))


def prompts():
    """A donor, prompts with its document elsewhere, and prompts with a document that no ended request had."""
    some = random_tokens(4)
    kept, left = some(500), some(500)
    moved = [[*some(33 + i), *kept, *some(30)] for i in range(2)]
    return [*some(20), *kept, *some(20)], moved, [[*some(20 + i), *left, *some(30)] for i in range(3)]


DONOR, MOVED, LEFT = prompts()


def disk(path):
    return {"disk_path": str(path / "donors"), "disk_bytes": 1 << 30, "disk_key_path": str(path / "key")}


def donor_files(path):
    return sorted((path / "donors" / FOLDER).glob("*.donor.safetensors"))


def written(served):
    for _ in range(2):  # a step orders the write, another one tells its end
        served.settle()
        served.worker._worker.transfers.drain()


def ready(served):
    served.worker._worker.transfers.drain()
    served.ask(FIRST, max_tokens=1)
    while served.runtime.disk.found:
        served.ask(FIRST, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
    return served


def leave_running(served):
    """Ends in the middle: one request of the two decodes, and the other one's prompt is computed in part."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    for name, prompt in zip("ab", LEFT, strict=False):
        served.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(4):
            served.llm.llm_engine.step()
    assert len(served.core.scheduler.running) == 2


def killed(path):
    """The life of an engine whose process ends without a word, in a process of its own."""
    settings = {**WHOLE[1], **disk(Path(path))}
    served = serving(kv_transfer_config=transfer(WHOLE[0], settings), max_num_batched_tokens=128)
    served.ask(DONOR, max_tokens=1)
    written(served)
    leave_running(served)
    os._exit(7)


@pytest.fixture(scope="module")
def cold():
    return cold_answers(*MOVED, *LEFT)


def test_what_was_running_when_the_process_was_killed_is_no_donor(engine, cold, tmp_path):
    policy, settings = WHOLE[0], {**WHOLE[1], **disk(tmp_path)}
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(str(tmp_path),))
    process.start()
    process.join(120)
    assert process.exitcode == 7
    served = ready(engine(policy, {**settings, "min_donor_tokens": 4096}))
    assert len(donor_files(tmp_path)) == 1
    stats = served.scheduler.donor_index.catalog.stats()
    assert (stats.ready, stats.resting) == (0, 1)
    for prompt in (*LEFT[1:], MOVED[0]):  # each but the last one is a cold run of what was left
        answer = served.ask(prompt, max_tokens=16)
        assert (answer.cached, answer.tokens) == (0, cold(prompt).tokens)
    assert served.report().reason == "donor_on_disk"
    ready(served)
    answer = served.ask(MOVED[1], max_tokens=16)
    assert served.offered > 400
    assert answer.tokens == cold(MOVED[1]).tokens
