"""The router in front of stand-in replicas: requests, answers, refusals and retries."""

import asyncio
import hashlib
import json
import threading

import aiohttp
import numpy as np
import pytest

from semblend_trt.config import EventFormat
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.router.app import Placer
from semblend_trt.fleet.router.config import Caller
from semblend_trt.fleet.router.counters import RouterCounters
from semblend_trt.fleet.routing_policy import Replica, SpanOverlap
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.fleet.wire import Emitter, EventWriter
from semblend_trt.prompts import ReadingThreads
from tests.semblend_trt.fleet.router.conftest import router
from tests.semblend_trt.fleet.router.malformed import answered
from tests.semblend_trt.samples import BASE_NAMESPACE

KEYS = [{"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenants": [name]} for name in ("acme", "globex")]


def as_tenant(name):
    return {"Authorization": f"Bearer {name}"}


@router()
async def test_bodies_go_through_and_answers_come_back(parts):
    status, answer, headers = await parts.ask(prompt="abc", max_tokens=5, user="a user")
    assert (status, answer["choices"]) == (200, [{"text": "1"}])
    assert parts.replicas[0].bodies == [{"prompt": "abc", "max_tokens": 5, "user": "a user"}]
    assert headers["X-SemBlend-Worker"] == "1.0"
    assert headers["X-Request-ID"] == parts.replicas[0].headers[0]["X-Request-ID"]
    refused = await parts.ask("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=0)
    assert refused[:2] == (400, {"error": {"message": "max_tokens"}})
    assert parts.count("semblend_router_requests_total", worker="1.0", status="200") == 1
    # The tiny tokenizer has no template, so the chat's length is guessed by its bytes.
    guessed = len(json.dumps(parts.replicas[0].bodies[1])) // 4
    assert parts.count("semblend_router_tokens_total", kind="prompt") == 3 + guessed


@router()
async def test_streams_go_through_byte_by_byte(parts):
    stream = await parts.read(prompt="abc", stream=True)
    async with aiohttp.request("POST", parts.replicas[1].url + "/v1/completions", json={"stream": True}) as response:
        assert stream.replace(b'"1"', b'"2"') == await response.read()
    assert parts.count("semblend_router_first_byte_seconds_count") == 1


@router()
async def test_a_clients_salt_is_left_out(parts):
    await parts.ask(prompt="abc", cache_salt="stolen")
    assert parts.replicas[0].bodies == [{"prompt": "abc"}]
    assert parts.count("semblend_router_client_salts_total") == 1


@router(keys=KEYS)
async def test_tenants_get_their_salts_from_the_router(parts):
    for name in ("acme", "globex", "acme"):
        status, _, _ = await parts.ask(prompt="abc", cache_salt="stolen", headers=as_tenant(name))
        assert status == 200
    bodies = [*parts.replicas[0].bodies, *parts.replicas[1].bodies]
    salts = [body["cache_salt"] for body in bodies]
    assert sorted(map(salts.count, set(salts))) == [1, 2]
    assert "stolen" not in salts
    assert not any("Authorization" in each for replica in parts.replicas for each in replica.headers)


@pytest.mark.parametrize(
    ("headers", "status", "reason"),
    [({}, 401, "unknown_key"), (as_tenant("acme") | {"X-Tenant-ID": "globex"}, 403, "tenant_forbidden")],
)
@router(keys=KEYS)
async def test_a_refused_caller_reaches_no_replica(parts, headers, status, reason):
    got, answer, _ = await parts.ask(prompt="abc", headers=headers)
    assert (got, answer["error"]["code"]) == (status, reason)
    assert [replica.bodies for replica in parts.replicas] == [[], []]
    assert parts.count("semblend_router_refusals_total", reason=reason) == 1
    async with parts.client.get("/v1/models", headers=headers) as response:
        assert response.status == status


@pytest.mark.parametrize("key", [b"\xff", b"\xed\xa0\x80", b"\xc3\xa9"])
@router(keys=KEYS)
async def test_a_key_may_be_any_bytes(parts, key):
    head = b"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer " + key + b"\r\n\r\n"
    assert b" 401 " in await answered(parts.address, head)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behave", "reason"), [("dying", "unreachable"), ("busy", "unwilling"), ("ill", "unwilling"), ("silent", "slow")]
)
@router(first_byte_seconds=1)
async def test_another_replica_is_asked_before_the_first_byte(parts, behave, reason, stream):
    parts.replicas[0].behave = behave
    assert b'"2"' in await parts.read(prompt="abc", stream=stream)
    if behave == "silent":
        await parts.replicas[0].left.wait()
    assert len(parts.replicas[0].bodies) == 1
    assert parts.count("semblend_router_failed_attempts_total", reason=reason) == 1
    # A dead replica is not used until a check finds it healthy; a busy or slow one is.
    healthy = parts.count("semblend_router_replica_healthy", worker="1.0")
    assert healthy == (behave in ("busy", "silent"))
    assert parts.count("semblend_router_replica_load", worker="1.0") == 0


@router()
async def test_an_error_of_a_sound_replica_is_its_answer(parts):
    parts.replicas[0].behave = "wrong"
    status, answer, _ = await parts.ask(prompt="abc")
    assert (status, answer) == (500, {"error": {"message": "the engine"}})
    assert parts.replicas[1].bodies == []
    assert parts.count("semblend_router_replica_healthy", worker="1.0") == 1


def events_of(stream):
    """The data of a stream's events as a client of the API reads them: by the rules of server-sent events, as JSON."""
    events, data = [], list[str]()
    for line in stream.decode().splitlines():
        if not line and data:
            events.append(json.loads("\n".join(data)))
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
    return events


@pytest.mark.parametrize(("behave", "healthy"), [("cut", 0), ("torn", 0), ("stuck", 1), ("dripping", 1)])
@router(silence_seconds=0.2)
async def test_a_stream_that_is_not_ended_gets_an_error_and_is_not_repeated(parts, behave, healthy):
    parts.replicas[0].behave = behave
    async with parts.client.post("/v1/completions", json={"prompt": "abc", "stream": True}) as response:
        stream = await response.content.readany()
        parts.replicas[0].go_on.set()
        first, last = events_of(stream + await response.read())
    assert first["choices"] == [{"text": "first"}]
    assert last["error"]["code"] == "broken_stream"
    assert parts.replicas[1].bodies == []
    assert parts.count("semblend_router_broken_streams_total") == 1
    # A slow replica is as healthy as it says.
    assert parts.count("semblend_router_replica_healthy", worker="1.0") == healthy


@router(replicas=3)
async def test_redirects_of_a_replica_are_not_followed(parts):
    parts.replicas[0].behave = "away"
    parts.replicas[0].elsewhere = parts.replicas[2].url
    _, answer, headers = await parts.ask(prompt="abc")
    assert (answer["choices"], headers.get("Location")) == ([{"text": "2"}], None)
    assert parts.replicas[2].bodies == []


@router()
async def test_without_a_willing_replica_the_request_is_refused(parts):
    for replica in parts.replicas:
        replica.behave = "dying"
    status, answer, _ = await parts.ask(prompt="abc")
    assert (status, answer["error"]["code"]) == (503, "no_replica")
    assert "replica 2.0 failed" in answer["error"]["message"]
    assert (await parts.ask(prompt="abc"))[1]["error"]["message"] == (
        "the request was not served: no replica is healthy; try again later"
    )
    async with parts.client.get("/health") as response:
        assert (response.status, (await response.json())["replicas"]) == (503, {"1.0": False, "2.0": False})


@router()
async def test_a_client_that_leaves_a_stream_frees_its_replica(parts):
    parts.replicas[0].behave = "endless"
    response = await parts.client.post("/v1/completions", json={"prompt": "abc", "stream": True})
    await response.content.readany()
    assert parts.count("semblend_router_replica_in_flight", worker="1.0") == 1
    # The prompt is computed, so it is no load any more.
    assert parts.count("semblend_router_replica_load", worker="1.0") == 0
    response.close()
    await parts.replicas[0].left.wait()
    while parts.count("semblend_router_replica_in_flight", worker="1.0"):
        await asyncio.sleep(0)


@router(max_answer_bytes=1024)
async def test_an_answer_that_is_too_large_is_refused(parts):
    parts.replicas[0].behave = "large"
    status, answer, _ = await parts.ask(prompt="abc")
    assert (status, answer["error"]["code"]) == (502, "answer_too_large")


@router()
async def test_what_fails_in_the_router_is_answered_and_counted(parts, monkeypatch):
    monkeypatch.setattr(parts.router, "_forwarder", None)
    status, answer, _ = await parts.ask(prompt="abc")
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (500, "internal_error", "server_error")
    assert parts.count("semblend_router_refusals_total", reason="internal_error") == 1
    assert parts.count("semblend_router_replica_load", worker="1.0") == 0


@router()
async def test_it_tells_of_itself(parts):
    async with parts.client.get("/health") as response:
        status = await response.json()
    assert status == {"status": "ok", "replicas": {"1.0": True, "2.0": True}, "directory": {}}
    async with parts.client.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
    async with parts.client.get("/metrics") as response:
        assert 'semblend_router_replica_healthy{worker="1.0"} 1.0' in await response.text()
    async with parts.client.get("/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "http_error")


def test_telemetry_has_hashes_and_no_text(routed, tmp_path):
    path = tmp_path / "requests.jsonl"

    async def test(parts):
        headers = as_tenant("acme") | {"X-Session-ID": "session-7"}
        for stream in (False, True):
            await parts.read(prompt="a secret document\n\nasked about", stream=stream, headers=headers)
        await parts.ask(prompt="a secret document\n\nasked about", headers=as_tenant("globex"))
        parts.replicas[0].behave = parts.replicas[1].behave = "dying"
        await parts.ask(prompt="b", headers=headers)

    routed(test, keys=KEYS, telemetry={"path": path})
    text = path.read_text()
    for word in ("secret", "document", "acme", "session-7"):
        assert word not in text
    whole, streamed, other, refused = lines = list(map(json.loads, text.splitlines()))
    hashes = [[block["content_hash"] for block in line["blocks"]] for line in lines]
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])
    assert whole["tenant_id"] == streamed["tenant_id"] != other["tenant_id"]
    assert (whole["session_id"], other.get("session_id")) == (streamed["session_id"], None)
    assert [block["token_count"] for block in whole["blocks"]] == [len("a secret document\n\n"), len("asked about")]
    assert "observed_ttft_ms" not in whole
    assert 0 < streamed["observed_ttft_ms"] <= streamed["observed_total_latency_ms"]
    for line in (whole, streamed):
        assert (line["observed_prefix_hit_tokens"], line["observed_prefill_tokens"]) == (2, 1)
        assert (line["metadata"]["reused_tokens"], line["metadata"]["status"]) == (3, 200)
    assert (refused["metadata"]["status"], refused["metadata"]["attempts"]) == (503, 2)


@router(keys=KEYS, tenant_requests=2)
async def test_a_tenant_that_has_its_share_under_way_waits_and_others_do_not(parts):
    for replica in parts.replicas:
        replica.behave = "endless"
    body = {"prompt": "abc", "stream": True}
    streams = [await parts.client.post("/v1/completions", json=body, headers=as_tenant("acme")) for _ in range(2)]
    for each in streams:
        await each.content.readany()
    status, refused, headers = await parts.ask(**body, headers=as_tenant("acme"))
    assert (status, headers["Retry-After"], refused["error"]["code"]) == (429, "1", "tenant_busy")
    async with parts.client.post("/v1/completions", json=body, headers=as_tenant("globex")) as other:
        assert other.status == 200
    for each in streams:
        each.close()
    while (await parts.client.post("/v1/completions", json=body, headers=as_tenant("acme"))).status != 200:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 1500\r\n\r\n" + b"{" * 1500,
        b"Content-Encoding: deflate\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
@router(keys=KEYS, tenant_bytes=2500, max_body_bytes=2400, header_seconds=0.5)
async def test_a_tenants_bodies_count_before_they_are_read(parts, framing):
    """What says its length counts with that, what does not with the most that it may have."""
    tokens = "a" * 1500
    parts.replicas[0].behave = parts.replicas[1].behave = "silent"
    first = asyncio.ensure_future(parts.ask(prompt=tokens, headers=as_tenant("acme")))
    while not parts.replicas[0].bodies:
        await asyncio.sleep(0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer acme\r\n"
    answer = await answered(parts.address, head + framing)
    assert b" 429 " in answer.partition(b"\r\n")[0]
    first.cancel()


@router(max_prompt_tokens=8)
async def test_a_prompt_that_no_replica_can_hold_is_refused_unread(parts, tokenizer):
    longest = max(map(len, tokenizer.get_vocab()))
    for prompt in ("a" * (8 * longest + 1), [1] * 9):
        status, answer, _ = await parts.ask(prompt=prompt)
        assert (status, answer["error"]["code"]) == (400, "prompt_too_long")
    assert parts.replicas[0].bodies == []
    assert (await parts.ask(prompt="a" * 8 * longest))[0] == 200


@router(status={"host": "127.0.0.1", "port": 0, "sha256": hashlib.sha256(b"operator").hexdigest()})
async def test_its_state_may_be_told_elsewhere_and_need_a_key(parts, capsys):
    address = capsys.readouterr().err.rpartition("status on ")[2].strip()
    for path in ("/health", "/metrics"):
        async with parts.client.get(path) as response:
            assert response.status == 404
        async with parts.client.get(address + path) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (401, "unknown_key")
        async with parts.client.get(address + path, headers=as_tenant("operator")) as response:
            assert response.status == 200
    async with parts.client.get(address + "/v1/models") as response:
        assert response.status == 404


DOCUMENT = "".join(chr(97 + at) for at in np.random.default_rng(0).integers(0, 26, 400))
PROMPT = "Another instruction. " + DOCUMENT + " And a question?"
REPLICAS = [Replica((1, 0), 0), Replica((2, 0), 0)]


@pytest.fixture
def directory(tokenizer):
    """Worker 2 holds the document, for the salt "a" alone."""
    namespace = BASE_NAMESPACE.for_request("a", None)
    tokens = tokenizer.encode("Some instruction. " + DOCUMENT)
    sketch = sketch_of(tokens, sketch_key(namespace.key, "a")).to_bytes()
    writer = EventWriter(Emitter(2, 0, 1), EventFormat.JSON)
    known = Directory()
    known.observe(writer.reset())
    known.observe(writer.registered("d", namespace, "host", len(tokens), 1, sketch))
    return known


@pytest.fixture
def place(tokenizer, directory):
    """place(salt, body, ...): the prompt as it was read, the worker that was chosen, and the counters."""

    def run(salt, body, *, reader=tokenizer, known=directory, seconds=60.0):
        counters, caller = RouterCounters(), Caller("tenant", salt)
        placer = Placer(ReadingThreads(reader), known, SpanOverlap(), counters, seconds)
        try:
            prompt = asyncio.run(placer.read(body, 4000, caller))
            return prompt, placer.choose(prompt, caller, REPLICAS).worker, counters
        finally:
            placer.prompts.close()

    return run


def fallbacks(counters, reason):
    return counters.registry.get_sample_value("semblend_router_fallbacks_total", {"reason": reason})


def test_a_request_goes_where_its_document_is(place, tokenizer):
    prompt, worker, _ = place("a", {"prompt": PROMPT})
    assert worker == (2, 0)
    assert prompt.tokens == len(tokenizer.encode(PROMPT))
    (holder,) = prompt.holders
    assert 0.7 * len(DOCUMENT) <= holder.tokens <= prompt.tokens


class Failing:
    """A tokenizer, or a directory, that fails."""

    def encode(self, *_, **__):
        raise RuntimeError("injected")

    holders = encode


@pytest.mark.parametrize(
    ("given", "reason", "tokens"),
    [
        *(({"body": {"prompt": bad}}, "unread_prompt", 1000) for bad in (5, [1 << 70], [1 << 31], [-1])),
        ({"reader": Failing()}, "unread_prompt", 1000),
        ({"known": Failing()}, "directory_failed", len(PROMPT)),
    ],
)
def test_a_prompt_that_cannot_be_read_or_looked_up_is_placed_by_load(place, given, reason, tokens):
    prompt, worker, counters = place("a", **{"body": {"prompt": PROMPT}} | given)
    assert (prompt.holders, prompt.tokens, worker) == ((), tokens, (1, 0))
    assert (prompt.token_ids is None) == (reason == "unread_prompt")
    assert fallbacks(counters, reason) == 1


def test_a_slow_tokenizer_is_not_waited_for(place):
    go_on = threading.Event()

    class Slow:
        def encode(self, *_, **__):
            go_on.wait(60)
            return [1]

    prompt, worker, counters = place("a", {"prompt": PROMPT}, reader=Slow(), seconds=0.01)
    go_on.set()
    assert (prompt.token_ids, worker) == (None, (1, 0))
    assert fallbacks(counters, "slow_reading") == 1
