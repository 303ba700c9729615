"""Requests through Dynamo's frontend and our component: who gets them, what kills cost, how fast answers pass.

Two workers answer without an engine. A text comes after each of five instructions, each round once the events of
the one before are known. Kills end a worker in the middle of its answers, and it is started again. The component's
speed is that of answers of 256 tokens, 32 at once, which the workers give as fast as they can.
"""

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path

import aiohttp

from benchmarks.fleet.dynamo_fleet import MODEL_PATH, Answer, DynamoFleet
from benchmarks.fleet.events import loopback_server
from benchmarks.program import Count, run_counted
from semblend_trt.model_tokenizer import load_tokenizer
from validation.results import Results

INSTRUCTIONS = (
    "Summarise:",
    "Who speaks here, and where?",
    "Translate the following passage to plain words, and keep names as they are.",
    "List three facts.",
    "Go on with this old page of a book in its own style:",
)
CONCURRENCIES = (1, 4, 16)
TEXT_WORDS, EVENT_SECONDS = 420, 1.0
KILLS, KILL_SECONDS, KILLED_TOKENS, KILLED_AT_ONCE, TOKEN_SECONDS = 3, 2.0, 48, 8, 0.01
SPEED_TOKENS, SPEED_AT_ONCE = 256, 32


@contextmanager
def running(token_seconds: float) -> Iterator[DynamoFleet]:
    """Start a nats-server, a frontend, a component and the workers 1 and 2."""
    with tempfile.TemporaryDirectory() as folder, loopback_server() as server:
        fleet = DynamoFleet(Path(folder), server.url)
        try:
            fleet.component()
            for number in (1, 2):
                fleet.worker(number, "--token-seconds", str(token_seconds))
            yield fleet
        finally:
            fleet.close()


async def with_client(fleet: DynamoFleet, work: Callable[[aiohttp.ClientSession], Awaitable[float]]) -> float:
    """Return what `work` measures once both workers answer."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await fleet.ready(client, 2)
        return await work(client)


async def gathered(
    fleet: DynamoFleet, client: aiohttp.ClientSession, prompts: list[list[int]], most: int, at_once: int
) -> list[Answer]:
    """Return the answers of `most` tokens to `prompts`, `at_once` at a time."""
    turns = asyncio.Semaphore(at_once)

    async def ask(prompt: list[int]) -> Answer:
        async with turns:
            return await fleet.ask(client, prompt, most)

    return await asyncio.gather(*map(ask, prompts))


def prompts_of(texts: int, seed: int) -> list[list[list[int]]]:
    """Return the texts' prompts, each round after another instruction."""
    tokenizer, draws = load_tokenizer(str(MODEL_PATH)), random.Random(seed)
    words = (files("validation") / "assets" / "excerpt.txt").read_text(encoding="utf-8").split()
    chosen = [" ".join(draws.choices(words, k=TEXT_WORDS)) for _ in range(texts)]
    return [[tokenizer.encode(f"{each} ({at}) {text}") for at, text in enumerate(chosen)] for each in INSTRUCTIONS]


async def routed_to_holder(
    fleet: DynamoFleet, rounds: list[list[list[int]]], at_once: int, client: aiohttp.ClientSession
) -> float:
    """Return the share of the later rounds' requests that the first round's worker got."""
    seen: list[list[str]] = []
    for prompts in rounds:
        seen.append([answer.placed["worker"] for answer in await gathered(fleet, client, prompts, 16, at_once)])
        await asyncio.sleep(EVENT_SECONDS)
    follows: list[bool] = [each == first for later in seen[1:] for each, first in zip(later, seen[0], strict=True)]
    return sum(follows) / len(follows)


async def answered_through_kills(fleet: DynamoFleet, streams: int, client: aiohttp.ClientSession) -> float:
    """Return the share of the streams that are whole, and the same as without kills."""
    draws = random.Random(0)
    prompts = [[draws.randrange(100, 2000) for _ in range(100)] for _ in range(streams)]
    whole = [answer.text for answer in await gathered(fleet, client, prompts, KILLED_TOKENS, KILLED_AT_ONCE)]
    asked = asyncio.create_task(gathered(fleet, client, prompts, KILLED_TOKENS, KILLED_AT_ONCE))
    for kill in range(KILLS):
        await asyncio.sleep(KILL_SECONDS)
        await fleet.ready(client, 2)  # or no worker may be left
        number = 1 + kill % 2
        fleet.end(f"worker-{number}", signal.SIGKILL)
        fleet.worker(number, "--token-seconds", str(TOKEN_SECONDS))
    if asked.done():
        raise RuntimeError(f"{streams} streams ended before {KILLS} kills; ask for more")
    answers = await asked
    return sum(each.error is None and each.text == text for each, text in zip(answers, whole, strict=True)) / streams


async def tokens_per_s(fleet: DynamoFleet, streams: int, client: aiohttp.ClientSession) -> float:
    """Return the tokens a second of answers that the workers give at once."""
    prompts = [[100 + at] * 100 for at in range(streams)]
    start = time.perf_counter()
    answers = await gathered(fleet, client, prompts, SPEED_TOKENS, SPEED_AT_ONCE)
    seconds = time.perf_counter() - start
    return float(sum(answer.usage["completion_tokens"] for answer in answers)) / seconds


def run(texts: int, streams: int, results: Results) -> None:
    """Add the rows."""
    shares = []
    with running(0.0) as fleet:
        for seed, at_once in enumerate(CONCURRENCIES):
            work = partial(routed_to_holder, fleet, prompts_of(texts, seed), at_once)
            shares.append(asyncio.run(with_client(fleet, work)))
        speed = asyncio.run(with_client(fleet, partial(tokens_per_s, fleet, streams // 2)))
    with running(TOKEN_SECONDS) as fleet:
        answered = asyncio.run(with_client(fleet, partial(answered_through_kills, fleet, streams)))
    placed = f"{texts} texts after {len(INSTRUCTIONS)} instructions, 1, 4 and 16 at once, the worst; 2 workers"
    results.add("dynamo_routed_to_holder_share", min(shares), "share", placed, 0.98, "higher")
    killed = f"{streams} streams of {KILLED_TOKENS} tokens, {KILLED_AT_ONCE} at once, through {KILLS} kills of a worker"
    results.add("dynamo_answered_through_kills", answered, "share", killed, 1.0, "higher")
    passed = (
        f"answers of {SPEED_TOKENS} tokens, {SPEED_AT_ONCE} at once, with frontend, workers and client on the machine"
    )
    results.add("dynamo_component_tokens_per_s", speed, "tokens/s", passed, 7000.0, "higher")


_COUNTS = [Count("texts", 40, "texts"), Count("streams", 600, "streams through kills")]
main = partial(run_counted, "fleet_dynamo", __doc__, _COUNTS, run)

if __name__ == "__main__":
    main()
