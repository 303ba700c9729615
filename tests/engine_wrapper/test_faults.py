"""A worker that is killed, a donor's text that changes on disk and a missing NATS server cost a cold prefill only."""

import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.donors.disk_tier import FOLDER
from tests.engine_wrapper.embedded_llm import disk_tier, drain, evict_prefixes, find_donors
from validation.documents import stock_list
from validation.embedded_engine import open_cold, open_llm
from validation.models import load, shipped_model
from validation.prompts import render

POOL_TOKENS, ANSWER = 2048, SamplingParams(max_tokens=8)
LISTS = [stock_list(random.Random(seed), rows=12) for seed in range(3)]
DONOR, *OTHERS = (render("Answer briefly.", [one.text for one in LISTS], each.questions[1].text) for each in LISTS)
SERVE_AND_DIE = "import sys; from tests.engine_wrapper.test_faults import serve_and_die; serve_and_die(*sys.argv[1:])"
NO_SERVER = "nats://127.0.0.1:1"
MOST_REQUESTS_BEFORE_A_CONNECTION_FAILS = 200


@contextmanager
def engine(runner, folder=None, **variables):
    """An engine with donors in host memory under policy exact, and with a `folder` on disk too."""
    settings = {"POLICY": "exact", "HOST_BYTES": str(1 << 30), "EMBEDDER": "off"}
    settings |= variables | ({} if folder is None else disk_tier(folder))
    with open_llm(shipped_model(), runner.share(), settings, pool_tokens=POOL_TOKENS) as llm:
        find_donors(llm)
        yield llm


def serve(llm, prompt):
    evict_prefixes(llm)
    (output,) = llm.generate([prompt], ANSWER)
    drain(llm)
    return output


def counted(metric, **labels):
    return REGISTRY.get_sample_value(f"semblend_{metric}_total", labels) or 0.0


@pytest.fixture(scope="module")
def runner():
    return load(None, None, "float32")


@pytest.fixture(scope="module")
def reused(runner):
    """Serves prompts, whose answers must be a cold engine's; returns the tokens that each reuses."""
    answers = {}
    with open_cold(shipped_model(), runner, POOL_TOKENS) as cold:
        for prompt in (DONOR, *OTHERS):
            (output,) = cold.generate([prompt], ANSWER)
            answers[prompt] = output.outputs[0].token_ids

    def compare(llm, *prompts):
        outputs = [serve(llm, prompt) for prompt in prompts]
        assert [each.outputs[0].token_ids for each in outputs] == [answers[prompt] for prompt in prompts]
        return [each.reused_tokens for each in outputs]

    return compare


def serve_and_die(folder, point):
    """Serves one donor; is killed while its file is written, or once it is saved and before an index has it."""

    def kill(*_arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    with engine(load(None, None, "float32"), Path(folder)) as llm:
        worker = llm.connector_worker
        finished = worker.saver.finished

        def finished_or_dead():
            if worker.saver._saves:
                worker.saver.drain()
                worker.transfers.drain()
                kill()
            return finished()

        if point == "writing":
            os.fsync = kill
        else:
            worker.saver.finished = finished_or_dead
        serve(llm, DONOR)


@pytest.mark.parametrize(("point", "event"), [("writing", "file_refused"), ("saved", "file_found")])
def test_another_worker_takes_over_the_folder_of_a_killed_one(tmp_path, runner, reused, point, event):
    ended = subprocess.run([sys.executable, "-c", SERVE_AND_DIE, str(tmp_path), point], check=False)
    assert ended.returncode == -signal.SIGKILL
    before = counted("tier_events", event=event)
    with engine(runner, tmp_path) as llm:
        assert reused(llm, *OTHERS)[-1] > 0
    assert counted("tier_events", event=event) > before


def test_a_donor_whose_text_has_changed_on_disk_is_refused(tmp_path, runner, reused):
    """Otherwise another text would be served from its KV."""
    with engine(runner, tmp_path) as llm:
        reused(llm, DONOR)
        form = llm.connector_worker.transfers._disk.form
    (path,) = (tmp_path / FOLDER).glob("*.donor.safetensors")
    data = bytearray(path.read_bytes())
    tokens = (len(data) - form.header_bytes) // (form.token_bytes + 4)
    data[form.header_bytes + tokens * form.token_bytes + 4 * 10] ^= 1
    path.write_bytes(data)
    before = counted("tier_events", event="file_refused")
    with engine(runner, tmp_path, MIN_DONOR_TOKENS="4096") as llm:
        assert reused(llm, *OTHERS) == [0, 0]
    assert counted("tier_events", event="file_refused") == before + 1


def test_without_a_nats_server_requests_are_served_and_the_failure_is_counted(runner, reused):
    before = counted("event_connections", result="failed")
    with engine(runner, NATS_URL=NO_SERVER) as llm:
        assert reused(llm, DONOR, *OTHERS)[-1] > 0
        for _ in range(MOST_REQUESTS_BEFORE_A_CONNECTION_FAILS):
            if counted("event_connections", result="failed") > before:
                return
            reused(llm, DONOR)
    pytest.fail("the missing server was not counted")
