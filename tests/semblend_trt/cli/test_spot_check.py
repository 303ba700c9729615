"""Sampled requests are computed once more without reuse, compared, and test the promise of the profile."""

import asyncio
import json
from math import log

import pytest
from aiohttp import web

from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig
from semblend_trt.cli.main import main
from semblend_trt.cli.spot_check import tell_broken
from semblend_trt.fleet.connection import ConnectionOptions
from tests.semblend_trt.cli.test_warm import serving
from tests.semblend_trt.fleet.conftest import PublishingWorker
from tests.server_process import answering, wait_for

ASKED = {"model": "tiny", "prompt": "a", "temperature": 0, "max_tokens": 1}
BOUNDED = {"profile": "a" * 64, "namespace": "b" * 64, "max_kl": 0.01, "risk": 0.2, "sampled_tokens": 9}


class StandIn:
    """A server whose answer has a `receipt`, and a first token of this `likelihood`; a cold run gives it 0.5."""

    def __init__(self, receipt=None, likelihood=None, cold="same", place="semblend"):
        self.receipt, self.likelihood, self.cold, self.place, self.bodies = receipt, likelihood, cold, place, []

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        is_cold = "semblend.cold" in (body.get("kv_transfer_params") or {})
        if "logprobs" in body and self.likelihood is None:
            return web.json_response({"error": {"message": "no logprobs"}}, status=400)
        text = self.cold if is_cold else "same"
        if text is None:
            return web.json_response({"error": {"message": "the engine"}}, status=500)
        choice = {"text": text}
        if "logprobs" in body:
            first = 0.5 if is_cold else self.likelihood
            row = {"token_id:1": log(first), "token_id:2": log(1 - first)}
            choice["logprobs"] = {"tokens": ["token_id:1"], "top_logprobs": [row]}
        told = {"usage": {"semblend": self.receipt}}
        if self.place == "kv_transfer_params":
            told = {"kv_transfer_params": {"semblend.receipt": self.receipt}}
        return web.json_response({"choices": [choice], **told})


def options_of(server):
    return ConnectionOptions((server.url,), "semantic-kv-events")


@pytest.fixture
def worker(nats_server):
    """A worker that the server knows."""
    worker = PublishingWorker(options_of(nats_server))
    worker.add("a")
    assert worker.publisher.flush(30)
    yield worker
    worker.publisher.close()


@pytest.fixture
def check(tmp_path, capsys):
    """check(server, bodies ...): the exit status and the report."""

    def run(server, *bodies, words=("--share", "1")):
        file = tmp_path / "requests.jsonl"
        file.write_text("".join(json.dumps(body) + "\n" if isinstance(body, dict) else body for body in bodies))
        with answering(server.answer) as url:
            status = main(["spot-check", "--url", url, *words, str(file)])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.promise(
    "commands",
    "`semblend-trt spot-check` says of a sample of requests whether a run without reuse says the same, straight and "
    "through LiteLLM",
)
@pytest.mark.parametrize("place", ["semblend", "kv_transfer_params"])
def test_both_answers_are_compared(check, place):
    for cold, result in (("same", "equal"), ("sane", "differs"), (None, "failed")):
        server = StandIn({"reused_tokens": 3}, cold=cold, place=place)
        status, report = check(server, ASKED, {"body": ASKED | {"stream": True}})
        assert (status, report["cold_runs"]) == (2 if cold is None else 0, {result: 2})
        salts = [body.get("cache_salt") for body in server.bodies if "semblend.cold" in str(body)]
        assert len(set(salts)) == 2
        assert not any(body.get("stream") for body in server.bodies)
    assert check(StandIn({"reused_tokens": 3}, cold="sane"), ASKED)[1]["differences"] == [
        {"result": "differs", "compared": "text", "first_difference": 2}
    ]


def test_what_reused_nothing_or_cannot_be_repeated_needs_no_cold_run(check):
    server = StandIn({"reused_tokens": 0})
    status, report = check(server, ASKED, ASKED | {"temperature": 1}, "no JSON\n", "[3]\n", {"model": "tiny"})
    assert (status, report["sampled"], report["unread"]) == (0, 2, 3)
    assert (report["without_reuse"], report["cold_runs"]) == (1, {"not_comparable": 1})
    assert len(server.bodies) == 2  # one with likelihoods, which the server refused


@pytest.mark.promise(
    "commands",
    "A broken promise ends approximate reuse in its namespace under its profile: workers hear of it, and count the "
    "reason `bound_broken`",
)
def test_a_broken_promise_is_found_and_workers_are_told(check, nats_server, worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_NATS_URL", nats_server.url)
    status, report = check(StandIn(BOUNDED | {"reused_tokens": 3}, 0.52), *[ASKED] * 3)
    assert (status, report["bound_checks"], report["broken"]) == (0, {"within": 3}, [])
    status, report = check(StandIn(BOUNDED | {"reused_tokens": 3}, 0.9), *[ASKED] * 40)
    assert (status, report["bound_checks"]["broken"]) == (1, 1)
    assert report["broken"] == [{"profile": "a" * 64, "namespace": "b" * 64, "workers_told": True}]
    wait_for(lambda: worker.announcer.is_broken("a" * 64, "b" * 64))
    assert not worker.announcer.is_broken("a" * 64, "c" * 64)
    monkeypatch.delenv("SEMBLEND_NATS_URL")
    _, report = check(StandIn(BOUNDED | {"reused_tokens": 3}, 0.9), *[ASKED] * 40)
    assert not report["broken"][0]["workers_told"]


@pytest.mark.promise("commands", "A broken promise ends approximate reuse...")
@pytest.mark.parametrize("promise", [("short", "b" * 64), ("a" * 64, None), ([1], {})])
def test_what_names_no_promise_changes_nothing(nats_server, worker, promise):
    for each in (promise, ("a" * 64, "b" * 64)):
        asyncio.run(tell_broken(options_of(nats_server), *each))
    wait_for(lambda: worker.publisher.broken)
    assert worker.publisher.broken == {("a" * 64, "b" * 64)}
    assert worker.counters.resyncs["requested"] == 0


@pytest.mark.promise("commands", "`semblend-trt spot-check` says of a sample...")
def test_answers_of_a_real_engine(tiny_qwen2_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEMBLEND_POLICY", "exact")
    llm = LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512, kv_connector_config=KvCacheConnectorConfig.ours())
    page, file = "some text that is long enough to be kept " * 6, tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(ASKED | {"prompt": page + end, "max_tokens": 8}) + "\n" for end in "abc"))
    with serving(llm) as url:
        assert main(["spot-check", "--url", url, "--share", "1", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cold_runs"].get("equal", 0) + report["without_reuse"] == 3
