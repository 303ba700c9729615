"""A worker over HTTP: the OpenAI API's answers and refusals, streams, clients that leave, donors kept while idle."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded.server import Worker, main

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 4
CONNECTOR = KvCacheConnectorConfig(
    connector_module="engine_wrapper.connector",
    connector_scheduler_class="SemBlendKvConnectorScheduler",
    connector_worker_class="SemBlendKvConnectorWorker",
)


@pytest.fixture
def make_worker(tiny_qwen2_path):
    """make_worker(**fields of the engine): a worker of the name tiny; all end with the test."""
    workers = []

    def make(**fields):
        llm = LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512, **fields)
        workers.append(Worker(llm, "tiny"))
        return llm, workers[-1]

    yield make
    for worker in workers:
        worker.close()


def asked(worker, ask):
    """What `ask`, which is given a client of the worker, returns."""

    async def run():
        server = TestServer(worker.app())
        async with TestClient(server) as client:
            return await ask(client)

    return asyncio.run(asyncio.wait_for(run(), 120))


async def answer_of(client, path, body):
    async with client.post(path, data=body if isinstance(body, bytes) else json.dumps(body)) as response:
        return response.status, await response.json()


def events_of(stream):
    return [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]


def test_a_completion_is_the_engines(tiny_qwen2_path, make_worker):
    llm, worker = make_worker()
    body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def ask(client):
        ids = llm.tokenizer.encode(DOCUMENT)
        async with client.post("/v1/completions", json={**body, "stream": True}) as response:
            kind, stream = response.content_type, await response.read()
        whole = await answer_of(client, "/v1/completions", body)
        cut = await answer_of(client, "/v1/completions", {**body, "stop": whole[1]["choices"][0]["text"][2:4]})
        return whole, kind, stream, cut, await answer_of(client, "/v1/completions", {**body, "prompt": ids})

    (status, whole), kind, stream, (_, cut), (_, by_ids) = asked(worker, ask)
    with LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512) as alone:
        (expected,) = alone.generate(DOCUMENT, SamplingParams(max_tokens=8, ignore_eos=True))
    text = expected.outputs[0].text
    assert status == 200
    assert whole["choices"][0] == {"index": 0, "logprobs": None, "text": text, "finish_reason": "length"}
    assert whole["usage"]["prompt_tokens"] == len(DOCUMENT)
    assert kind == "text/event-stream"
    *chunks, end = events_of(stream)
    assert end == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == text
    assert len(chunks) > 1
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == (text[: text.find(text[2:4])], "stop")
    assert by_ids["choices"] == whole["choices"]


def test_a_chat_needs_a_template(make_worker):
    llm, worker = make_worker()
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    status, answer = asked(worker, lambda client: answer_of(client, "/v1/chat/completions", body))
    assert (status, answer["error"]["code"]) == (400, "bad_prompt")
    assert answer["error"]["message"] == "the model's tokenizer has no chat template; use /v1/completions"
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    templated = Worker(llm, "tiny")
    try:
        status, answer = asked(templated, lambda client: answer_of(client, "/v1/chat/completions", body))
    finally:
        templated.close()
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == len("user: hello\nassistant:")
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"{", 400, "bad_json", "the body is not JSON; send a JSON object"),
        (b"[]", 400, "bad_json", "the body is a JSON list; send a JSON object"),
        (b"[" * 100_000, 400, "bad_json", "the body is not JSON"),
        ({"prompt": ["a", "b"]}, 400, "bad_prompt", "one prompt a request"),
        ({"prompt": ""}, 400, "bad_request", "the prompt is empty"),
        ({"prompt": "\ud800"}, 400, "bad_prompt", "lone surrogate"),
        ({"prompt": [1, 1 << 70]}, 400, "bad_request", "the prompt holds a token id beyond the model's ids"),
        ({"prompt": [1, 900]}, 400, "bad_request", "the prompt holds token id 900"),
        ({"prompt": "a" * 600}, 400, "bad_request", "exceeds max_seq_len 512"),
        ({"prompt": "a", "model": "other"}, 404, "model_not_found", "this worker serves the model tiny alone"),
        ({"prompt": "a", "n": 2}, 400, "unsupported_field", "n is not supported"),
    ],
)
def test_what_cannot_be_served_is_named(make_worker, body, status, code, message):
    _, worker = make_worker()
    got, answer = asked(worker, lambda client: answer_of(client, "/v1/completions", body))
    assert (got, answer["error"]["code"]) == (status, code)
    assert message in answer["error"]["message"]


def test_a_client_that_leaves_ends_its_request(make_worker):
    llm, worker = make_worker()
    body = {"prompt": DOCUMENT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}

    async def ask(client):
        response = await client.post("/v1/completions", json=body)
        await response.content.readany()
        response.close()
        while (await (await client.get("/health")).json())["running"]:
            await asyncio.sleep(0)
        return await answer_of(client, "/v1/completions", {"prompt": "a", "max_tokens": 1})

    assert asked(worker, ask)[0] == 200
    assert llm.executor.num_unfinished == 0


def test_an_engine_that_failed_is_not_healthy(make_worker, monkeypatch):
    llm, worker = make_worker()

    def broken(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm.executor.model_runner, "forward", broken)

    async def ask(client):
        before = (await client.get("/health")).status
        failed = await answer_of(client, "/v1/completions", {"prompt": "a"})
        return before, failed, await (await client.get("/health")).json()

    before, (status, answer), health = asked(worker, ask)
    assert before == 200
    assert (status, answer["error"]["code"]) == (503, "engine_stopped")
    assert health == {"status": "stopped", "reason": "out of memory"}


def test_salts_keep_tenants_apart_and_donors_are_kept_while_nothing_runs(make_worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_MIN_DONOR_TOKENS", "32")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)
    body = {"prompt": DOCUMENT, "max_tokens": 2, "temperature": 0}

    async def ask(client):
        def usage(answer):
            return answer[1]["usage"]["prompt_tokens_details"]

        first = usage(await answer_of(client, "/v1/completions", {**body, "cache_salt": "a"}))
        while not llm.connector_scheduler.library.held().donors:
            await asyncio.sleep(0)
        other = usage(await answer_of(client, "/v1/completions", {**body, "cache_salt": "b"}))
        same = usage(await answer_of(client, "/v1/completions", {**body, "cache_salt": "a"}))
        return first, other, same, await (await client.get("/metrics")).text()

    first, other, same, metrics = asked(worker, ask)
    assert first["computed_tokens"] == other["computed_tokens"] == len(DOCUMENT)
    assert same["cached_tokens"] + same["reused_tokens"] > len(DOCUMENT) // 2
    assert "semblend_requests_total" in metrics


def test_a_model_that_cannot_be_served_is_named(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "nothing"), "--port", "0"]) == 2
    assert "nothing" in capsys.readouterr().err.splitlines()[-1]


def test_a_port_that_is_none_is_bad_usage(capsys):
    for port in ("65536", "-1", "http"):
        with pytest.raises(SystemExit) as ended:
            main(["--model", "nothing", "--port", port])
        assert ended.value.code == 2
        assert f"{port!r} is no port from 0 to 65535" in capsys.readouterr().err


def test_models_are_listed(make_worker):
    _, worker = make_worker()

    async def ask(client):
        return await (await client.get("/v1/models")).json()

    (model,) = asked(worker, ask)["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 512)
