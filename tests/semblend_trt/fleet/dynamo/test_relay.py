"""Dynamo's frontend, our component, workers and nats-server: placement, and what is left of each fault."""

import asyncio
import shutil
import signal

import pytest

from benchmarks.fleet.dynamo import MODEL, MODEL_PATH, WORKERS, tokens_per_s
from semblend_trt.fleet.dynamo.relay import SILENT_SECONDS

pytestmark = pytest.mark.dynamo

TEXT = 600
# The first token of what worker 1 drops, in benchmarks/fleet/dynamo_worker.py, which only Dynamo's environment imports.
DROPPED = 17
ANSWER = 60


async def answers(fleet, client, prompts, most=ANSWER, on_event=lambda: None):
    return await asyncio.gather(*(fleet.ask(client, prompt, most, on_event=on_event) for prompt in prompts))


async def known(fleet, client, some, text, **fields):
    """Asks for a text after other beginnings until the component knows who holds it."""
    while not (answer := await fleet.ask(client, some(20) + text, 1, **fields)).placed["held_tokens"]:
        pass
    return answer


class Begun:
    """`called` is set at the `count`th event of some answers."""

    def __init__(self, count):
        self._left, self.called = count, asyncio.Event()

    def __call__(self):
        self._left -= 1
        if not self._left:
            self.called.set()


def assert_whole(cold, found):
    """The same answers as before, whole, with the usage of the whole."""
    assert [answer.error for answer in found] == [None] * len(found)
    assert [answer.text for answer in found] == [answer.text for answer in cold]
    assert [answer.usage for answer in found] == [answer.usage for answer in cold]


@pytest.mark.promise("fleet", "Through Dynamo a text goes to the worker that holds it, and salted tenants stay apart")
async def test_a_text_goes_to_the_worker_that_holds_it_wherever_it_stands(fleet, client, some, make_reader):
    texts, reader = [some(TEXT) for _ in range(8)], make_reader(fleet.nats.url)
    first = await answers(fleet, client, [some(20) + text for text in texts], 2)
    holders = [answer.told["kv_transfer_params"]["semblend.receipt"]["worker"] for answer in first]
    assert set(holders) == {"1.0", "2.0"}

    def is_told(reader):
        held = [reader.directory.holders(text) for text in texts]
        return all(held) and [f"{each[0].worker[0]}.0" for each in held] == holders

    assert reader.wait_for(is_told)
    await fleet.ask(client, some(20), 1)  # the component has read what came before this request
    for own in (5, 90):
        again = await answers(fleet, client, [some(own) + text + some(own) for text in texts], 2)
        assert [answer.placed["worker"] for answer in again] == holders
        assert all(answer.placed["held_tokens"] > TEXT / 2 for answer in again)


@pytest.mark.promise("fleet", "Through Dynamo a text goes to...")
async def test_salted_tenants_stay_apart(fleet, client, some):
    text = some(TEXT)
    mine = await known(fleet, client, some, text, salt="mine")
    assert mine.told["seen"]["salt"] == "mine"
    for salt in ("yours", None):
        answer = await fleet.ask(client, some(20) + text, 1, salt=salt)
        assert answer.placed["held_tokens"] == 0


@pytest.mark.promise(
    "fleet",
    "Through Dynamo a bad request is answered and no worker counts as dead; a worker with another tokenizer is not "
    "asked",
)
async def test_bad_requests_are_answered_and_no_worker_counts_as_dead(fleet, client, some):
    unknown = await fleet.ask(client, some(20), 1, model="another")
    assert unknown.status == 404
    for _ in range(2):
        long = await fleet.ask(client, some(4097), 1)
        assert (long.error["code"], "4097 tokens" in long.error["message"]) == (400, True)
        assert (await fleet.ask(client, some(4097), 1, stream=False)).status == 400
    both = await answers(fleet, client, [some(20) for _ in range(8)], 1)
    assert {(answer.placed["worker"], answer.placed["attempts"]) for answer in both} == {("1.0", 1), ("2.0", 1)}


@pytest.mark.promise(
    "fleet",
    "Through Dynamo an answer goes on elsewhere when its worker is killed or frozen, a slow one is waited for, and "
    "what is asked to end answers what it has",
)
async def test_an_answer_goes_on_when_its_worker_is_killed_and_the_worker_comes_back_elsewhere(fleet, client, some):
    prompts, text = [some(40) for _ in range(12)], some(TEXT)
    cold, begun = await answers(fleet, client, prompts), Begun(60)
    again = asyncio.create_task(answers(fleet, client, prompts, on_event=begun))
    await begun.called.wait()
    fleet.end("worker-1")
    found = await again
    assert_whole(cold, found)
    assert {answer.placed["attempts"] for answer in found} == {1, 2}
    continued = sum(answer.placed["attempts"] > 1 for answer in found)
    assert await fleet.counted(client, 'semblend_dynamo_requests_total{result="continued"}') == continued
    fleet.begin(1)
    await fleet.ready(client, 2)
    while (await known(fleet, client, some, text)).placed["worker"] != "1.0":
        text[:] = some(TEXT)


async def test_an_answer_goes_on_when_an_engine_drops_it(fleet, client, some):
    found = await answers(fleet, client, [[DROPPED, *some(20)]] * 4)
    assert_whole(found[:1] * 4, found)
    assert any(answer.placed["attempts"] > 1 for answer in found)
    assert {answer.placed["worker"] for answer in found} == {"2.0"}


@pytest.mark.promise("fleet", "Through Dynamo an answer goes on...")
async def test_an_answer_goes_on_when_its_worker_is_frozen(fleet, client, some):
    prompts = [some(40) for _ in range(8)]
    cold, begun = await answers(fleet, client, prompts), Begun(40)
    again = asyncio.create_task(answers(fleet, client, prompts, on_event=begun))
    await begun.called.wait()
    fleet.send("worker-2", signal.SIGSTOP)
    # It takes connections and answers nothing, until Dynamo no longer counts it as alive.
    late = asyncio.create_task(answers(fleet, client, prompts))
    try:
        assert_whole(cold, await again)
        assert_whole(cold, await late)
    finally:
        fleet.end("worker-2")


@pytest.mark.promise("fleet", "Through Dynamo an answer goes on...")
async def test_a_slow_answer_is_waited_for(fleet, client, some):
    answer = await fleet.ask(client, [SILENT_SECONDS + 3, *some(20)], 2)
    assert (answer.error, answer.placed["attempts"]) == (None, 1)


@pytest.mark.promise("fleet", "Without NATS requests are served, and...")
async def test_requests_are_answered_without_nats_and_placed_again_behind_it(fleet, client, some):
    old, new = some(TEXT), some(TEXT)
    holder = (await known(fleet, client, some, old)).placed["worker"]
    fleet.nats.kill()
    assert [each.error for each in await answers(fleet, client, [some(40) for _ in range(4)], 2)] == [None] * 4
    fleet.nats.start()
    await known(fleet, client, some, new)
    assert (await fleet.ask(client, some(30) + old, 1)).placed["worker"] == holder


async def test_a_client_that_leaves_ends_its_request(fleet, client, some):
    series, most = 'semblend_dynamo_requests_total{result="answered"}', 4000  # more than a minute of tokens
    before, begun = await fleet.counted(client, series), Begun(2)
    request = asyncio.create_task(fleet.ask(client, some(20), most, on_event=begun))
    await begun.called.wait()
    request.cancel()

    async def ended():
        while await fleet.counted(client, series) == before:
            pass

    await asyncio.wait_for(ended(), 30)


async def test_the_benchmark_says_how_fast_answers_pass(fleet, client):
    assert await tokens_per_s(fleet, client, 4) > 0


@pytest.mark.promise("fleet", "Through Dynamo an answer goes on...")
@pytest.mark.parametrize("name", ["worker-1", "component"])
async def test_what_is_asked_to_end_answers_what_it_has(fleet, client, some, name):
    prompts = [some(40) for _ in range(8)]
    cold, begun = await answers(fleet, client, prompts), Begun(40)
    if name == "component":
        fleet.component("component-2")
        while "2 components serve this model" not in fleet.log_of("component").read_text():
            await asyncio.sleep(0)
    again = asyncio.create_task(answers(fleet, client, prompts, on_event=begun))
    await begun.called.wait()
    ended = asyncio.create_task(asyncio.to_thread(fleet.end, name, signal.SIGTERM))
    found = await again
    assert_whole(cold, found)
    assert {answer.placed["attempts"] for answer in found} == {1}
    assert await ended == 0
    assert_whole(cold, await answers(fleet, client, prompts))


@pytest.mark.promise("fleet", "Through Dynamo a bad request is...")
async def test_workers_that_cannot_be_placed_by_text(fleet, client, some, tmp_path):
    """Dynamo's mocker has no connector, and another worker has a tokenizer of its own."""
    other = shutil.copytree(MODEL_PATH, tmp_path / "other")
    with (other / "tokenizer.json").open("a") as tokenizer:
        tokenizer.write("\n")
    model = str(MODEL_PATH)
    fleet.start(
        "mocker", "dynamo.mocker", "--model-path", model, "--endpoint", f"dyn://{WORKERS}", "--model-name", MODEL
    )
    fleet.begin(9, model=other)
    seen, log = set(), fleet.log_of("component")
    while not {"1.0", "2.0", None} <= seen or "its tokenizer has the digests" not in log.read_text():
        for answer in await answers(fleet, client, [some(40) for _ in range(4)], 1):
            assert answer.error is None
            seen.add(answer.placed["worker"])
    assert seen == {"1.0", "2.0", None}
    for problem in ("no_connector", "other_tokenizer"):
        assert await fleet.counted(client, f'semblend_dynamo_problems_total{{problem="{problem}"}}') > 0
    assert "names no worker id" in log.read_text()
