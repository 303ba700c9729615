"""A worker over HTTP: the OpenAI API's answers and refusals, streams, clients that leave, donors kept while idle."""

from __future__ import annotations

import asyncio
import json
import logging
from itertools import pairwise

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import example, given
from hypothesis import strategies as st

from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded.request import CompletionOutput, RequestOutput
from engine_wrapper.embedded.server import (
    BOUNDS,
    AnswerForm,
    EngineThread,
    TextSoFar,
    Worker,
    main,
    read_body,
    usage_of,
)
from semblend_trt.fleet.router.cold_runs import VERIFY_HEADER
from semblend_trt.fleet.router.serving import Connections, RequestRefusedError, ServerBounds, listening
from tests.semblend_trt.fleet.router.malformed import answered, error_of, statuses

VERIFY = {VERIFY_HEADER: "cold"}
DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 4
CONNECTOR = KvCacheConnectorConfig.ours()


@pytest.fixture
def make_worker(tiny_qwen2_path):
    """make_worker(**fields of the engine): a worker of the name tiny; all end with the test."""
    workers = []

    def make(bounds=BOUNDS, **fields):
        llm = LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512, **fields)
        workers.append(Worker(llm, "tiny", bounds))
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


def broken(_):
    raise RuntimeError("out of memory")


def events_of(stream):
    return [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]


def test_a_completion_is_the_engines(tiny_qwen2_path, make_worker):
    llm, worker = make_worker()
    body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def ask(client):
        ids = llm.tokenizer.encode(DOCUMENT)
        async with client.post("/v1/completions", json={**body, "stream": True}) as response:
            kind, stream = response.content_type, await response.read()
        (model,) = (await (await client.get("/v1/models")).json())["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 512)
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
    assert "semblend" not in whole["usage"]  # there is no connector
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
        ({"prompt": "a" * 1_000_000}, 400, "prompt_too_long", ""),
        (b" " * ((2 << 20) + 1), 413, "body_too_large", ""),
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
    monkeypatch.setattr(llm.executor.model_runner, "forward", broken)

    async def ask(client):
        before = (await client.get("/health")).status
        failed = await answer_of(client, "/v1/completions", {"prompt": "a"})
        return before, failed, await (await client.get("/health")).json()

    before, (status, answer), health = asked(worker, ask)
    assert before == 200
    assert (status, answer["error"]["code"]) == (503, "engine_stopped")
    assert health == {"status": "stopped", "reason": "RuntimeError: out of memory"}


def test_salts_keep_tenants_apart_and_donors_are_kept_while_nothing_runs(make_worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_MIN_DONOR_TOKENS", "32")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)
    body = {"prompt": DOCUMENT, "max_tokens": 2, "temperature": 0}

    async def ask(client):
        def usage(answer):
            return answer[1]["usage"]["prompt_tokens_details"]

        first = usage(await answer_of(client, "/v1/completions", {**body, "cache_salt": "a"}))
        while not llm.connector_scheduler.donor_index.held().donors:
            await asyncio.sleep(0)
        other = usage(await answer_of(client, "/v1/completions", {**body, "cache_salt": "b"}))
        same = usage(await answer_of(client, "/v1/completions", {**body, "cache_salt": "a"}))
        return first, other, same, await (await client.get("/metrics")).text()

    first, other, same, metrics = asked(worker, ask)
    assert first["computed_tokens"] == other["computed_tokens"] == len(DOCUMENT)
    assert same["cached_tokens"] + same["reused_tokens"] > len(DOCUMENT) // 2
    assert "semblend_requests_total" in metrics


def test_every_answer_has_its_receipt_and_a_stream_in_its_last_chunk(make_worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    monkeypatch.setenv("SEMBLEND_MIN_DONOR_TOKENS", "32")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)
    body = {"max_tokens": 2, "temperature": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}}

    async def ask(client):
        first = (await answer_of(client, "/v1/completions", {**body, "prompt": DOCUMENT}))[1]["usage"]["semblend"]
        while not llm.connector_scheduler.donor_index.held().donors:
            await asyncio.sleep(0)
        moved = (await answer_of(client, "/v1/completions", {**body, "prompt": "The " + DOCUMENT}))[1]["usage"]
        stopped = {**body, "prompt": "A " + DOCUMENT, "max_tokens": 9, "stop": "e", **options}
        async with client.post("/v1/completions", json=stopped) as response:
            *_, last, _ = events_of(await response.read())
        return first, moved, json.loads(last)["usage"]["semblend"]

    first, moved, streamed = asked(worker, ask)
    assert (first["outcome"], first["reused_tokens"], first["policy"]) == ("cold_fallback", 0, "position_fix")
    told, details = moved["semblend"], moved["prompt_tokens_details"]
    assert told["outcome"] == streamed["outcome"] == "backend_materialized_reuse"
    assert told["reused_tokens"] == details["reused_tokens"] > len(DOCUMENT) // 2
    assert streamed["reused_tokens"] > len(DOCUMENT) // 2


async def held(llm, count=1):
    while llm.connector_scheduler.donor_index.held().donors < count:
        await asyncio.sleep(0)


def test_an_answer_is_compared_with_a_cold_run_where_its_header_asks_for_it(make_worker, tiny_qwen2_path, monkeypatch):
    """Moved as it is, KV makes some answers differ: the receipt knows which, as an engine without reuse does."""
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)
    prompts = [f"{begin} {DOCUMENT}" for begin in ("The", "Zebras!", "~" * 40)] + [DOCUMENT + "It ends."]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}

    async def ask(client):
        await answer_of(client, "/v1/completions", {**body, "prompt": DOCUMENT})
        await held(llm)
        told = []
        for prompt in prompts:
            async with client.post("/v1/completions", json={**body, "prompt": prompt}, headers=VERIFY) as response:
                answer = await response.json()
            receipt = answer["usage"]["semblend"]
            assert receipt["reused_tokens"] + receipt["exact_prefix_tokens"] > len(DOCUMENT) // 2
            told.append((answer["choices"][0]["text"], receipt["verified"]))
        return told

    told = asked(worker, ask)
    with LLM(tiny_qwen2_path, dtype="float32", max_seq_len=512) as alone:
        cold = alone.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    right = [output.outputs[0].text for output in cold]
    assert [verified["result"] for _, verified in told] == [
        "equal" if text == expected else "differs" for (text, _), expected in zip(told, right, strict=True)
    ]
    assert {verified["result"] for _, verified in told} == {"equal", "differs"}
    assert {verified["compared"] for _, verified in told} == {"tokens"}
    assert llm.connector_scheduler.outcomes.reasons()["cold_run"] == len(prompts)


def test_what_cannot_be_compared_is_said_and_costs_no_run(make_worker):
    llm, worker = make_worker(kv_connector_config=CONNECTOR)
    body = {"prompt": DOCUMENT, "max_tokens": 4, "ignore_eos": True, "temperature": 0.8}
    usage = {"stream": True, "stream_options": {"include_usage": True}}

    async def verified(client, **fields):
        async with client.post("/v1/completions", json={**body, **fields}, headers=VERIFY) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            *_, last, _ = events_of(await response.read())
            return response.status, json.loads(last)

    async def ask(client):
        sampled, seeded = await verified(client), await verified(client, seed=5)
        streamed = await verified(client, **usage, temperature=0, stop="e")
        refused = await verified(client, stream=True)
        async with client.post("/v1/completions", json=body, headers={VERIFY_HEADER: "warm"}) as response:
            return sampled, seeded, streamed, refused, (response.status, await response.json())

    *answered, refused, wrong = asked(worker, ask)
    results = [answer["usage"]["semblend"]["verified"]["result"] for _, answer in answered]
    assert results == ["not_comparable", "equal", "equal"]
    assert llm.connector_scheduler.outcomes.reasons()["cold_run"] == 2
    for status, answer in (refused, wrong):
        assert (status, answer["error"]["code"]) == (400, "bad_verify")


def test_a_sample_is_compared_while_nothing_else_runs_and_leaves_no_donor(make_worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    monkeypatch.setenv("SEMBLEND_AUDIT_SAMPLE", "1")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}

    async def counts(client):
        text = await (await client.get("/metrics")).text()
        found = [line.split() for line in text.splitlines() if line.startswith("semblend_cold_runs_total{")]
        return {name.split('"')[1]: float(value) for name, value in found}

    async def ask(client):
        before = await counts(client)
        await answer_of(client, "/v1/completions", {**body, "prompt": DOCUMENT})
        await held(llm)
        answers = [answer_of(client, "/v1/completions", {**body, "prompt": f"{at} {DOCUMENT}"}) for at in range(3)]
        receipts = [answer["usage"]["semblend"] for _, answer in await asyncio.gather(*answers)]
        reasons = llm.connector_scheduler.outcomes.reasons
        while sum((await counts(client)).values()) < sum(before.values()) + 3:
            await asyncio.sleep(0)
        return receipts, before, await counts(client), reasons()["cold_run"]

    receipts, before, after, runs = asked(worker, ask)
    assert all(receipt["reused_tokens"] and "verified" not in receipt for receipt in receipts)
    grown = {result: after[result] - before[result] for result in after}
    assert grown["equal"] + grown["differs"] == runs == 3
    assert llm.connector_scheduler.donor_index.held().donors == 1


def test_a_request_of_lower_priority_waits_and_one_that_is_to_be_exact_becomes_a_donor(make_worker, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    llm, worker = make_worker(kv_connector_config=CONNECTOR)
    waiting = {"max_tokens": 1, "priority": 1, "kv_transfer_params": {"semblend.exact_only": True}}

    async def ask(client):
        ended = []

        async def complete(name, prompt, **fields):
            status, answer = await answer_of(client, "/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
            assert status == 200
            ended.append(name)
            return answer["usage"]["prompt_tokens_details"]["reused_tokens"]

        streamed = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
        async with client.post("/v1/completions", json=streamed) as response:
            await response.content.readany()  # it runs from now on
            documents = [complete("first", DOCUMENT, **waiting), complete("version", "The " + DOCUMENT, **waiting)]
            tasks = [asyncio.ensure_future(each) for each in documents]
            while (await (await client.get("/health")).json())["running"] < 3:
                await asyncio.sleep(0)
            await complete("request", "b", max_tokens=3)
            await response.read()
        assert await asyncio.gather(*tasks) == [0, 0]
        while llm.connector_scheduler.donor_index.held().donors < 2:
            await asyncio.sleep(0)
        return ended

    assert asked(worker, ask)[0] == "request"
    refused = asked(worker, lambda client: answer_of(client, "/v1/completions", {"prompt": "a", "priority": -1}))
    assert (refused[0], refused[1]["error"]["code"]) == (400, "bad_field")


def test_a_model_that_cannot_be_served_is_named(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "nothing\x1b[2J"), "--port", "0"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("semblend-trt worker: ")
    assert "nothing\\x1b[2J" in told


def test_another_kv_dtype_is_refused_with_its_value(tiny_model_paths, capsys):
    model = ["--model", str(tiny_model_paths["deepseek_v3"]), "--device", "cpu", "--port", "0"]
    assert main([*model, "--kv-dtype", "int8"]) == 2
    assert "(given: 'int8')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        *(
            (option, " ", f"argument {option}: the name is empty")
            for option in ("--model", "--name", "--nats", "--profile")
        ),
        *(("--port", port, f"{port!r} is no port from 0 to 65535") for port in ("65536", "-1", "http")),
        ("--max-body-bytes", "0", "'0' is no int"),
        ("--body-seconds", "nan", "'nan' is no float"),
        ("--max-connections", "1.5", "'1.5' is no int"),
    ],
)
def test_what_cannot_be_an_argument_is_bad_usage(option, value, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--model", "nothing", option, value])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def served(worker, ask, bounds):
    """What `ask`, which is given the worker's address, returns; clients are bounded as main() bounds them."""

    async def run():
        async with listening(worker.app(), "127.0.0.1", 0, Connections(bounds)) as address:
            return await ask(address)

    return asyncio.run(asyncio.wait_for(run(), 120))


def test_no_malformed_request_is_an_error_of_the_workers(make_worker, caplog):
    bounds = ServerBounds(header_seconds=0.5, body_seconds=0.5)
    llm, worker = make_worker(bounds=bounds)

    async def ask(address):
        found = await statuses(address, 0, 300)
        body = b'{"prompt": "abc", "max_tokens": 1}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        return found, error_of(await answered(address, head + body))

    found, good = served(worker, ask, bounds)
    assert max(found) < 500
    assert {400, 404, 405} <= set(found)
    assert good == (200, None)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert llm.executor.num_unfinished == 0


# -- the engine's thread ----------------------------------------------------------------------------------------------

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


def test_no_more_run_than_may(engine):
    async def crowd():
        return await asyncio.gather(*(outputs_of(engine, PROMPTS[0]) for _ in range(6)), return_exceptions=True)

    ended = asyncio.run(crowd())
    refused = [each for each in ended if isinstance(each, RequestRefusedError)]
    assert len(refused) == 2
    assert "4 requests are running or waiting" in str(refused[0])


def test_an_engine_that_fails_ends_all_requests_and_takes_no_more(llm, engine, monkeypatch):
    monkeypatch.setattr(llm.executor.model_runner, "forward", broken)

    async def ask():
        return await asyncio.gather(*(outputs_of(engine, prompt) for prompt in PROMPTS), return_exceptions=True)

    for ended in (*asyncio.run(ask()), *asyncio.run(ask())):
        assert isinstance(ended, RequestRefusedError)
        assert (ended.reason, str(ended)) == ("engine_stopped", "the engine has stopped: RuntimeError: out of memory")
    assert engine.failure == "RuntimeError: out of memory"


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


# -- bodies and answers ----------------------------------------------------------------------------------------------


# As clients send them that know of these fields and want nothing of them.
NEUTRAL = {"logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "min_p": 0.0, "min_tokens": 0, "echo": False}


def test_where_nothing_is_said_the_apis_defaults_hold():
    body = {"prompt": "a", "temperature": None, "stop": None, "n": 1, "user": "me", "guided_json": None, **NEUTRAL}
    fields = read_body(body, is_chat=False)
    assert fields.sampling_params(16) == SamplingParams(max_tokens=16, temperature=1.0)
    assert (bool(fields.stream), fields.includes_usage, fields.stop_texts) == (False, False, ())


def test_what_is_said_becomes_sampling_parameters():
    body = {"max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 5, "ignore_eos": True}
    body |= {"stop_token_ids": [6], "stop": "x", "stream_options": {"include_usage": True}}
    fields = read_body(body, is_chat=True)
    assert fields.sampling_params(16) == SamplingParams(3, 0.0, 0.5, 4, 5, (6,), True)
    assert (fields.includes_usage, fields.stop_texts) == (True, ("x",))
    assert read_body({"max_completion_tokens": 7}, is_chat=True).sampling_params(16).max_tokens == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("n", 2),
            ("n", True),
            ("logprobs", 5),
            ("logprobs", 0),
            ("prompt_logprobs", 0),
            ("min_p", 0.1),
            ("min_tokens", 1),
        ],
        *[("lora_request", {"lora_name": "red"}), ("guided_json", {}), ("response_format", {"type": "json_object"})],
        *[("tools", [{}]), ("temprature", 0), ("thinking_token_budget", 5), ("truncate_prompt_tokens", 3)],
        *[("stream_options.more", 1), ("kv_transfer_params.prompt_token_ids", [1])],
    ],
)
def test_what_this_engine_does_not_know_is_named(name, value):
    field, _, inner = name.partition(".")
    for is_chat in (False, True):
        with pytest.raises(RequestRefusedError, match=f"^{name} is not supported by this engine; leave it") as refused:
            read_body({field: {inner: value} if inner else value}, is_chat=is_chat)
        assert (refused.value.status, refused.value.reason) == (400, "unsupported_field")


@pytest.mark.parametrize(
    ("field", "is_chat"),
    [
        *[(name, False) for name in ("messages", "documents", "chat_template_kwargs", "continue_final_message")],
        *[("add_generation_prompt", False), ("reasoning_effort", False), ("prompt", True), ("chat_template", True)],
    ],
)
def test_a_field_of_another_endpoint_is_named(field, is_chat):
    with pytest.raises(RequestRefusedError, match=f"^{field} is not supported"):
        read_body({field: "x"}, is_chat=is_chat)


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({}, "user:hi;none;go"),
        ({"documents": [{"text": "sun"}]}, "sun;user:hi;none;go"),
        ({"chat_template_kwargs": {"mood": "calm"}, "reasoning_effort": None}, "user:hi;none;calm;go"),
        ({"reasoning_effort": "low"}, "user:hi;low;go"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "user:hi"),
        ({"add_generation_prompt": False}, "user:hi;none;"),
    ],
)
def test_what_a_chats_prompt_is_made_of_is_read(make_worker, fields, rendered):
    llm, _ = make_worker()
    llm.tokenizer.chat_template = (
        "{% for d in documents or [] %}{{ d.text }};{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }};"
        "{% endfor %}{{ reasoning_effort or 'none' }};{% if mood %}{{ mood }};{% endif %}"
        "{% if add_generation_prompt %}go{% endif %}"
    )
    worker = Worker(llm, "tiny")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0, **fields}
    try:
        status, answer = asked(worker, lambda client: answer_of(client, "/v1/chat/completions", body))
    finally:
        worker.close()
    assert (status, answer.get("usage", answer).get("prompt_tokens")) == (200, len(rendered))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "hot", "temperature: Input should be a valid number"),
        ("temperature", -1, "temperature is -1.0; it must be a number >= 0"),
        ("max_tokens", 0, "max_tokens is 0; it must be an integer >= 1"),
        ("stop", [""], "stop"),
        ("cache_salt", 5, "cache_salt: Input should be a valid string"),
    ],
)
def test_values_out_of_bounds_are_named(name, value, message):
    with pytest.raises(RequestRefusedError, match=message) as refused:
        read_body({name: value}, is_chat=False).sampling_params(16)
    assert (refused.value.status, refused.value.reason) == (400, "bad_field")


OUTPUT = RequestOutput(
    request_id=1,
    prompt=None,
    prompt_token_ids=[1, 2, 3, 4, 5],
    outputs=[CompletionOutput("two", [6, 7], "stop")],
    cached_tokens=1,
    reused_tokens=2,
    computed_tokens=3,
    time_to_first_token=0.1,
    finished=True,
)


def shown(parts, stops=()):
    """The deltas of an answer that grows by `parts`, as far as it goes."""
    text, deltas, whole = TextSoFar(stops), [], ""
    for at, part in enumerate(parts):
        whole += part
        deltas.append(text.delta(whole, is_last=at == len(parts) - 1))
        if text.is_stopped:
            break
    return deltas, text


@given(st.lists(st.text("ab\n", max_size=4), min_size=1), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
@example(["a", "ab"], ["aab"])
def test_deltas_add_up_to_the_text_before_its_first_stop(parts, stops):
    deltas, text = shown(parts, tuple(stops))
    whole = "".join(parts)
    ends = [at for at in map(whole.find, stops) if at >= 0]
    # A stop that ends early is seen early, though one that begins before it may come: the text shown holds neither.
    assert "".join(deltas) == text.shown
    assert whole.startswith(text.shown)
    assert not any(stop in text.shown for stop in stops)
    assert text.is_stopped == bool(ends)
    if not ends:
        assert text.shown == whole


def test_half_a_character_is_held_back():
    text = TextSoFar()
    assert text.delta("a\ufffd", is_last=False) == "a"
    assert text.delta("aé", is_last=False) == "é"
    assert text.delta("aé\ufffd", is_last=True) == "\ufffd"


def test_what_may_become_a_stop_is_held_back():
    deltas, text = shown(["one\n", "two\n", "\nthree"], ("\n\n",))
    assert deltas == ["one", "\ntwo", ""]
    assert text.is_stopped


@pytest.mark.parametrize("is_chat", [False, True])
def test_whole_answers_and_chunks_have_the_apis_form(is_chat):
    form = AnswerForm("tiny", is_chat)
    usage = usage_of(OUTPUT)
    whole = form.whole("two", "stop", usage)
    lines = [form.chunk("t", None, is_first=True), form.chunk("wo", "stop", is_first=False), form.usage_chunk(usage)]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert all(line.endswith(b"\n\n") for line in lines)
    assert {answer["id"] for answer in [whole, *chunks]} == {whole["id"]}
    assert all(before["created"] == after["created"] for before, after in pairwise([whole, *chunks]))
    assert (
        whole["usage"]
        == chunks[-1]["usage"]
        == {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 1, "reused_tokens": 2, "computed_tokens": 3},
        }
    )
    assert chunks[-1]["choices"] == []
    if is_chat:
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "two"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:2]]
        assert deltas == [{"role": "assistant", "content": "t"}, {"content": "wo"}]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    else:
        assert {answer["object"] for answer in [whole, *chunks]} == {"text_completion"}
        assert [answer["choices"][0]["text"] for answer in [whole, *chunks[:2]]] == ["two", "t", "wo"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:2]] == [None, "stop"]
