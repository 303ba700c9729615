"""A real LiteLLM proxy with the callback, in front of the embedded engine's server: `make litellm-test` runs this."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher

import pytest
from aiohttp import web

from semblend_trt.prompts import ChatError
from tests.litellm_proxy import LiteLlm, deployment
from tests.semblend_trt.chat_bodies import READ, TEMPLATES
from tests.semblend_trt.conftest import NatsServer
from tests.semblend_trt.test_prompts import rendered
from tests.server_process import MODEL, ServerProcess, answering, wait_for

pytestmark = pytest.mark.litellm

SECRET = {"SEMBLEND_TENANT_SECRET": "a secret of the gateway's own"}
TEMPLATE = "{% for m in messages %}<|inst|>{{ m.role }}: {{ m.content }}\n{% endfor %}<|a|>"
INSTRUCTIONS = ("Who speaks here? ", "Read this, and go on with it. ", "Sum up. ", "Say it again: ", "What is it? ")
WORDS = (MODEL.parent / "excerpt.txt").read_text().split()
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
numbers = itertools.count()


def page(words=400):
    """A text of its own."""
    return " ".join(random.Random(next(numbers)).choices(WORDS, k=words))


class Worker(ServerProcess):
    """The embedded engine's server, at a free port by default."""

    def __init__(self, model, number, nats_url, port="0"):
        arguments = f"-m engine_wrapper.embedded.server --dtype float32 --port {port} --model".split()
        fleet = {"SEMBLEND_WORKER_ID": str(number), "SEMBLEND_NATS_URL": nats_url, "SEMBLEND_HEARTBEAT_SECONDS": "0.5"}
        super().__init__(*arguments, str(model), SEMBLEND_POLICY="position_fix", **fleet)


class Fleet:
    """Two workers, `one` and `two`, a NATS server, and the proxy in front of them."""

    def __init__(self, folder, ending):
        self.ending = ending
        self.model = folder / "model"
        shutil.copytree(MODEL, self.model)
        settings = json.loads((self.model / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
        (self.model / "tokenizer_config.json").write_text(json.dumps(settings))
        self.nats = NatsServer(folder / "nats")
        self.nats.start()
        ending.callback(self.nats.kill)
        self.workers = {name: Worker(self.model, at, self.nats.url) for at, name in enumerate(("one", "two"), 1)}
        for worker in self.workers.values():
            ending.callback(worker.kill)
        urls = {name: worker.address() for name, worker in self.workers.items()}
        listed = [deployment(name, url, at, self.model) for at, (name, url) in enumerate(urls.items(), 1)]
        other = deployment("one-otherwise", urls["one"], 1, MODEL, group="another tokenizer")
        bare = [deployment("bare", urls["two"], None, None, group="mixed")]
        ours = deployment("ours", urls["one"], 1, self.model, group="mixed")
        bare += [deployment(name, urls["one"], 1, self.model, group="twins") for name in "ab"]
        variables = {"SEMBLEND_NATS_URL": self.nats.url, **SECRET}
        self.proxy = LiteLlm(folder, [*listed, other, ours, *bare], {"timeout": 10}, **variables)
        ending.callback(self.proxy.kill)
        # The first request loads the tokenizer and connects to NATS.
        self.proxy.ask(page())
        wait_for(lambda: self.donors() > 0)

    def donors(self):
        return self.proxy.metric("semblend_fleet_donors")

    def reuses(self, prompt, holder):
        """Whether this worker answers, and reuses the text."""
        name, reused = self.proxy.ask(prompt)
        return name == holder and reused > 500

    def hold(self, prompt, **more):
        """Asks for a new text; returns its holder once the proxy knows of the donor."""
        known = self.donors()
        name, _ = self.proxy.ask(prompt, **more)
        wait_for(lambda: self.donors() > known)
        return name


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with contextlib.ExitStack() as ending:
        yield Fleet(tmp_path_factory.mktemp("litellm"), ending)


def as_chat(text):
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]}


@pytest.mark.promise("fleet", "A gateway sends a request where...")
@pytest.mark.parametrize("form", [str, as_chat])
def test_texts_behind_other_instructions_go_to_their_holder(fleet, form):
    texts = [page() for _ in range(4)]
    holders = [fleet.hold(form(INSTRUCTIONS[0] + text)) for text in texts]
    assert set(holders) == {"one", "two"}
    for instruction in INSTRUCTIONS[1:]:
        for text, holder in zip(texts, holders, strict=True):
            assert fleet.reuses(form(instruction + text), holder)


@pytest.mark.promise("fleet", "LiteLLM's callback makes each tenant's salt and drops the client's")
@pytest.mark.parametrize("place", ["cache_salt", "extra_body"])
def test_the_keys_tenant_is_the_salt_whatever_the_client_names(fleet, place):
    text = page()
    named = {place: "mine" if place == "cache_salt" else {"cache_salt": "mine"}}
    holder = fleet.hold({"prompt": "A" + text, **named})
    assert fleet.proxy.ask({"prompt": "B" + text, **named}, tenant="globex")[1] == 0
    for body in ({"prompt": "C" + text}, {"prompt": "D" + text, place: named[place]}):
        assert fleet.reuses(body, holder)
    assert fleet.proxy.metric("semblend_placement_client_salts_total") >= 3


@pytest.mark.promise("fleet", "What placement cannot read, find or...")
def test_a_deployment_without_the_connector_or_with_another_tokenizer_is_placed_by_load(fleet):
    before = fleet.proxy.metric('semblend_placements_total{result="not_held"}')
    text = page()
    assert fleet.proxy.ask({"prompt": text, "model": "another tokenizer"})[0] == "one-otherwise"
    assert fleet.proxy.metric('semblend_placements_total{result="not_held"}') == before + 1
    names = {fleet.proxy.ask({"prompt": page(), "model": "mixed"})[0] for _ in range(4)}
    assert names == {"bare", "ours"}
    twins = [fleet.proxy.ask({"prompt": text + end, "model": "twins"})[0] for end in "abcd"]  # who holds it is unknown
    assert [*map(twins.count, "ab")] == [2, 2]
    assert "2 deployments have semblend_worker_id 1" in fleet.proxy.log.read_text()


@pytest.mark.promise("fleet", "What placement cannot read, find or...")
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "model": "unknown"},
        {"prompt": "word " * 20_000},
        {"messages": []},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"prompt": "a", "suffix": "b"},
    ],
)
def test_a_bad_request_is_the_clients_fault_and_no_replica_counts_as_dead(fleet, body):
    status, _, answer = fleet.proxy.post(body)
    assert (400 <= status < 500, "error" in answer) == (True, True)
    assert {fleet.proxy.ask(page())[0] for _ in range(4)} == {"one", "two"}


@pytest.mark.promise("fleet", "Without NATS requests are served, and placed by text again when it is back")
def test_nats_is_lost_and_comes_back(fleet):
    text = page()
    holder = fleet.hold(INSTRUCTIONS[0] + text)
    fleet.nats.kill()
    wait_for(lambda: fleet.donors() == 0)
    assert fleet.proxy.ask(page())[0] in ("one", "two")
    fleet.nats.start()
    wait_for(lambda: fleet.donors() > 0)
    assert fleet.reuses(INSTRUCTIONS[1] + text, holder)


@pytest.mark.promise("fleet", "Workers of LiteLLM restart one after the other, and every request is answered")
def test_workers_restart_one_after_the_other_and_every_request_is_answered(fleet):
    with ThreadPoolExecutor(4) as threads:
        for number, (name, worker) in enumerate(list(fleet.workers.items()), 1):
            port = worker.address().rpartition(":")[2].strip("/")
            asked = [threads.submit(fleet.proxy.ask, page()) for _ in range(12)]
            os.kill(worker.pid, signal.SIGTERM)
            worker.wait()
            fleet.workers[name] = again = Worker(fleet.model, number, fleet.nats.url, port)
            fleet.ending.callback(again.kill)
            again.address()
            assert {each.result()[0] for each in asked} <= {"one", "two"}
    # A worker that was tried while it was away rests for a while. Of short pages no donor comes late, as `hold`'s own.
    wait_for(lambda: {fleet.proxy.ask(page(8))[0] for _ in range(2)} == {"one", "two"})
    text = page()
    holder = fleet.hold(INSTRUCTIONS[0] + text)
    assert fleet.reuses(INSTRUCTIONS[1] + text, holder)


@pytest.mark.promise("fleet", "A dead or frozen worker is replaced as long as the client was sent nothing")
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_freezes_or_dies_is_replaced(fleet, end):
    """The last tests of the fleet: a worker freezes, and goes on when its cooldown is over; then one dies."""
    wait_for(lambda: {fleet.proxy.ask(page(8))[0] for _ in range(2)} == {"one", "two"})
    text = page()
    holder = fleet.hold(INSTRUCTIONS[0] + text)
    os.kill(fleet.workers[holder].pid, end)
    try:
        name, _ = fleet.proxy.ask(INSTRUCTIONS[1] + text)
        assert name != holder
        with ThreadPoolExecutor(4) as threads:
            assert {name for name, _ in threads.map(fleet.proxy.ask, [page() for _ in range(12)])} == {name}
    finally:
        os.kill(fleet.workers[holder].pid, signal.SIGCONT)


class Replica:
    """A plain OpenAI replica of another make: streams an event, waits for `go_on`, and ends."""

    def __init__(self, go_on):
        self.go_on, self.headers, self.bodies, self.event = go_on, [], [], "first"

    async def answer(self, request):
        self.headers.append(request.headers)
        if request.method != "POST":
            return web.json_response({"path": request.path}, status=404)
        body = await request.json()
        self.bodies.append(body)
        form = {"id": "1", "object": "text_completion", "created": 1, "model": "model"}
        if not body.get("stream"):
            await asyncio.to_thread(self.go_on.wait)
            message = {"message": {"role": "assistant", "content": "whole"}}
            told = message if "messages" in body else {"text": "a"}
            return web.json_response({**form, "choices": [{"index": 0, "finish_reason": "stop", **told}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text, reason in ((self.event, None), ("last", "stop")):
            choice = {"index": 0, "text": text, "finish_reason": reason}
            await response.write(b"data: " + json.dumps({**form, "choices": [choice]}).encode() + b"\n\n")
            await asyncio.to_thread(self.go_on.wait)
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory):
    """A proxy without NATS in front of two such replicas, and what they wait for."""
    go_on = threading.Event()
    replicas = {name: Replica(go_on) for name in ("one", "two")}
    with answering(replicas["one"].answer) as one, answering(replicas["two"].answer) as two:
        deployments = [deployment("one", one, 1, MODEL), deployment("two", two, 2, MODEL)]
        proxy = LiteLlm(tmp_path_factory.mktemp("plain"), deployments, {"disable_cooldowns": True}, **SECRET)
        yield proxy, replicas, go_on
        go_on.set()
        proxy.kill()


@pytest.fixture
def plain(two_replicas):
    _, replicas, go_on = two_replicas
    go_on.clear()
    for replica in replicas.values():
        replica.headers, replica.bodies, replica.event = [], [], "first"
    return two_replicas


@pytest.mark.promise(
    "fleet",
    "A stream passes whole whatever its events hold, a slow answer is asked for once, and a stopped gateway ends "
    "its streams",
)
def test_streams_pass_whole_and_their_prompts_are_no_load_from_the_first_event_on(plain):
    proxy, replicas, go_on = plain
    for replica in replicas.values():
        replica.event = "x" * (3 << 19)
    stream = {"stream": True, "model": "shipped", "prompt": page(3000), "cache_salt": "mine", "max_tokens": 2}
    answer = proxy.open(stream)
    busy = answer.headers["x-litellm-model-id"]
    assert replicas[busy].event in answer.readline().decode()
    other = next(name for name in replicas if name != busy)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(proxy.post, {"prompt": "a"}) for _ in range(4)]
        wait_for(lambda: sum(len(each.bodies) for each in replicas.values()) == 5)
        assert len(replicas[other].bodies) == 2  # they take turns, beside a stream of some thousand tokens
        go_on.set()
        assert {each.result()[0] for each in asked} == {200}
    assert "[DONE]" in answer.read().decode()
    [sent] = {each.bodies[0]["cache_salt"] for each in replicas.values()}
    assert len(sent) == 64
    keys = {headers["Authorization"] for each in replicas.values() for headers in each.headers}
    assert keys == {"Bearer key-of-the-replica"}


def read(body, template):
    try:
        return rendered(body, template)
    except ChatError as error:
        return error.name


# LiteLLM drops `strict` of tools, joins the parts of an answer and makes developers' messages the system's.
REWRITTEN = ("an answer as parts", "developer after a system")


@pytest.mark.promise("fleet", "A replica of LiteLLM reads the prompt that was placed")
def test_a_replica_reads_the_chat_that_was_placed(plain):
    """To the character, or but for the little that LiteLLM rewrites, behind which spans are found all the same."""
    proxy, replicas, go_on = plain
    go_on.set()
    for name, body in READ.items():
        status, answered, answer = proxy.post(body)
        assert status == 200, (name, answer)
        sent = replicas[answered].bodies[-1]
        one, other = (read(each, TEMPLATES["parts"]) for each in (body, sent))
        alike = SequenceMatcher(None, one, other, autojunk=False).ratio()
        least = 0.9 if "tools" in body else 0.6 if name in REWRITTEN else 1
        assert alike >= least or other == "template", (name, one, other)


@pytest.mark.promise("fleet", "LiteLLM's callback makes each tenant's salt...")
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_every_route_carries_the_tenants_salt(plain, path):
    """Also where LiteLLM gives the replica a body of another form."""
    proxy, replicas, go_on = plain
    go_on.set()
    chat = [{"role": "user", "content": "Who speaks?"}]
    body = {"input": chat} if path.endswith("responses") else {"messages": chat}
    for place in ({"cache_salt": "mine"}, {"extra_body": {"cache_salt": "mine"}}):
        proxy.post({**body, **place, "cache_salt": "mine"}, path=path)
    sent = [each for replica in replicas.values() for each in replica.bodies]
    assert {len(each["cache_salt"]) for each in sent} == {64}
    assert len(sent) == 2


@pytest.mark.promise("fleet", "A stream passes whole whatever its...")
def test_a_slow_answer_is_asked_for_once_and_a_stopped_proxy_ends_its_streams(plain):
    """The last test of this proxy."""
    proxy, replicas, go_on = plain
    answer = proxy.open({"stream": True, "model": "shipped", "prompt": "a", "max_tokens": 2})
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(proxy.post, {"prompt": "b"})
        wait_for(lambda: sum(len(each.bodies) for each in replicas.values()) == 2)
        proxy.process.send_signal(signal.SIGTERM)
        answer.readline()
        go_on.set()
        assert "[DONE]" in answer.read().decode()
        assert slow.result()[0] == 200
    assert sum(len(each.bodies) for each in replicas.values()) == 2
    assert proxy.process.wait() in (0, -signal.SIGTERM)
