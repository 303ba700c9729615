"""The embedded engine over HTTP: answers, refusals, clients that leave, donors kept while the engine is idle."""

import asyncio
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded.server import Worker, main
from tests.builders.engine import unfinished
from tests.engine_wrapper.watching import failing

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 4
CONNECTOR, CHATS = KvCacheConnectorConfig.ours(), "/v1/chat/completions"


@pytest.fixture
def make_worker(tiny_qwen2_path, request):
    def make(**fields):
        llm = LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512, **fields)
        worker = Worker(llm, "tiny")
        request.addfinalizer(worker.close)
        return llm, worker

    return make


def asked(worker, ask):
    async def run():
        async with TestClient(TestServer(worker.app())) as client:
            return await ask(client)

    return asyncio.run(asyncio.wait_for(run(), 120))


async def answer_of(client, body, path="/v1/completions"):
    async with client.post(path, data=body if isinstance(body, bytes) else json.dumps(body)) as response:
        return response.status, await response.json()


async def usage_of(client, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    return (await answer_of(client, body))[1]["usage"]


async def running(client):
    return (await (await client.get("/health")).json())["running"]


async def donors_held(llm, count):
    while llm.connector_scheduler.donor_index.held().donors < count:
        await asyncio.sleep(0)


def test_completions_that_run_together_are_the_engines(tiny_qwen2_path, make_worker):
    llm, worker = make_worker()
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "top_p": None}
    prompts = [DOCUMENT, "A " + DOCUMENT, llm.tokenizer.encode(DOCUMENT)]

    async def ask(client):
        (model,) = (await (await client.get("/v1/models")).json())["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 512)
        return await asyncio.gather(*(answer_of(client, {**body, "prompt": prompt}) for prompt in prompts))

    answers = [answer for status, answer in asked(worker, ask) if status == 200]
    with LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512) as alone:
        expected = [alone.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))[0] for prompt in prompts]
    for answer, output in zip(answers, expected, strict=True):
        text = output.outputs[0].text
        assert answer["choices"] == [{"index": 0, "logprobs": None, "text": text, "finish_reason": "length"}]
        assert answer["usage"] == {**output.usage, "prompt_tokens_details": answer["usage"]["prompt_tokens_details"]}
        assert "semblend" not in answer["usage"]  # there is no connector


def unsupported(name, path="/v1/completions"):
    field, _, inner = name.partition(".")
    return {field: {inner: 1} if inner else 1}, 400, "unsupported_field", f"{name} is not supported by this", path


@pytest.mark.promise(
    "commands", "The embedded server honours a field of a request or answers with status 400 and the field's name"
)
def test_what_cannot_be_served_is_named(make_worker):
    (_, worker), chat = make_worker(), {"messages": [{"role": "user", "content": "hi"}]}
    refused = [
        (b"{", 400, "bad_json", "the body is not JSON; send a JSON object"),
        (b"[]", 400, "bad_json", "the body is not JSON"),
        (b"[" * 100_000, 400, "bad_json", "the body is not JSON"),
        ({"prompt": ["a", "b"]}, 400, "bad_prompt", "one prompt a request"),
        ({"prompt": ""}, 400, "bad_request", "the prompt is empty"),
        ({"prompt": [1, 900]}, 400, "bad_request", "the prompt holds token id 900"),
        ({"prompt": "a" * 600}, 400, "bad_request", "exceeds max_seq_len 512"),
        ({"prompt": "a", "model": "other"}, 404, "model_not_found", "this worker serves the model tiny alone"),
        ({"prompt": "a", "temperature": 0.7}, 400, "bad_field", "temperature: Input should be less"),
        ({"prompt": "a", "max_tokens": 0}, 400, "bad_request", "max_tokens is 0; it must be an integer >= 1"),
        (chat, 400, "bad_prompt", "has no chat template; use /v1/completions", CHATS),
        *(unsupported(name) for name in ("messages", "n", "kv_transfer_params.prompt_token_ids")),
        *(unsupported(name, CHATS) for name in ("prompt", "tools", "stream", "temprature")),
    ]

    async def ask(client):
        large = await client.post("/v1/completions", data=b" " * ((2 << 20) + 1))
        return large.status, [await answer_of(client, body, *path) for body, _, _, _, *path in refused]

    large, answers = asked(worker, ask)
    assert large == 413
    for (got, answer), (body, status, code, message, *_) in zip(answers, refused, strict=True):
        assert (got, answer["error"]["code"]) == (status, code), body
        assert message in answer["error"]["message"]


def test_a_client_that_leaves_ends_its_request(make_worker):
    llm, worker = make_worker()
    body = {"prompt": DOCUMENT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}

    async def ask(client):
        leaving = asyncio.ensure_future(answer_of(client, body))
        while not await running(client):
            await asyncio.sleep(0)
        leaving.cancel()
        while await running(client):
            await asyncio.sleep(0)
        return await answer_of(client, {"prompt": "a", "max_tokens": 1})

    assert (asked(worker, ask)[0], unfinished(llm.executor)) == (200, 0)


def test_an_engine_that_failed_is_not_healthy(make_worker, monkeypatch):
    llm, worker = make_worker()
    failing(monkeypatch, llm.executor.model_runner, "forward", RuntimeError, once=False)

    async def ask(client):
        before = (await client.get("/health")).status
        failed = [await answer_of(client, {"prompt": "a"}) for _ in range(2)]
        return before, failed, await (await client.get("/health")).json()

    before, failed, health = asked(worker, ask)
    assert before == 200
    for status, answer in failed:
        assert (status, answer["error"]["code"]) == (503, "engine_stopped")
        assert answer["error"]["message"] == "the engine has stopped: RuntimeError: injected"
    assert health == {"status": "stopped", "reason": "RuntimeError: injected"}


def test_salts_keep_tenants_apart_and_donors_are_kept_while_nothing_runs(make_worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_MIN_DONOR_TOKENS", "32")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)

    async def ask(client):
        first = await usage_of(client, DOCUMENT, cache_salt="a")
        await donors_held(llm, 1)
        usages = [first, *[await usage_of(client, DOCUMENT, cache_salt=salt) for salt in "ba"]]
        return [each["prompt_tokens_details"] for each in usages], await (await client.get("/metrics")).text()

    (first, other, same), metrics = asked(worker, ask)
    assert first["computed_tokens"] == other["computed_tokens"] == len(DOCUMENT)
    assert same["cached_tokens"] + same["reused_tokens"] > len(DOCUMENT) // 2
    assert "semblend_requests_total" in metrics


@pytest.mark.promise("policies", "Receipts tell checked reuse from unchecked...")
@pytest.mark.promise("commands", "Every answer has a receipt, in its usage or where vLLM has it")
def test_every_answer_has_its_receipt_and_a_cold_one_reuses_nothing(make_worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    monkeypatch.setenv("SEMBLEND_MIN_DONOR_TOKENS", "32")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)

    async def ask(client):
        first = await usage_of(client, DOCUMENT)
        await donors_held(llm, 1)
        moved = await usage_of(client, "The " + DOCUMENT)
        return first, moved, await usage_of(client, "A " + DOCUMENT, kv_transfer_params={"semblend.cold": True})

    first, moved, cold = asked(worker, ask)
    receipts = [usage["semblend"] for usage in (first, moved, cold)]
    outcomes = ["cold_fallback", "backend_materialized_reuse", "cold_fallback"]
    assert [receipt["outcome"] for receipt in receipts] == outcomes
    assert {receipt["policy"] for receipt in receipts} == {"position_fix"}
    assert receipts[1]["reused_tokens"] == moved["prompt_tokens_details"]["reused_tokens"] > len(DOCUMENT) // 2
    assert (receipts[2]["reason"], receipts[2]["reused_tokens"]) == ("cold_run", 0)


def test_a_model_that_cannot_be_served_is_named(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "nothing\x1b[2J"), "--port", "0"]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("semblend-trt worker: ")
    assert "nothing\\x1b[2J" in sentence
