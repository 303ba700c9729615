"""How fast a directory of the fleet's donors finds who holds a prompt, alone and while donors come and go.

First, 64 workers announce donors in real messages: they share a beginning and documents, and have text of their own.
Prompts of 32,768 tokens hold eight of the documents. The best of several rounds counts, since a machine may have other
work. Second, prompts are looked up while a thread of the same process, as in
a gateway, takes messages of donors that come and go.

Then what placing adds to a request in a gateway: the wait for its event loop, the look-up and the choice. The loop
takes donor events at a steady pace, as the directory's reader does, and requests come at theirs. Counted is the time
from when a request is due to its scores. NATS itself is left out.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.program import Count, run_counted, seconds
from semblend_trt.config import EventFormat
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.events import Emitter, EventWriter
from semblend_trt.fleet.placement import Placement
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.namespace import CacheNamespace
from validation.results import Results

_Tokens = npt.NDArray[np.int32]

# Bound to no request.
BASE_NAMESPACE = CacheNamespace(
    model="Qwen/Qwen2.5-7B-Instruct",
    model_revision="a09a35458c702b33eeacc393d103063234e8bc28",
    tokenizer="Qwen/Qwen2.5-7B-Instruct",
    tokenizer_revision="a09a35458c702b33eeacc393d103063234e8bc28",
    kv_layout="hnd",
    block_size=32,
    kv_dtype="bfloat16",
    cache_dtype="bfloat16",
    quantization=None,
    adapter=None,
    rope_config={"rope_theta": 1000000, "max_position_embeddings": 32768},
    tensor_parallel={"tp_size": 1, "pp_size": 1, "cp_size": 1},
    backend_cache_layout="trtllm_pytorch_primary_pool_v1",
)
NAMESPACE = BASE_NAMESPACE.for_request(None, None)
VOCABULARY = 150_000
KEY = sketch_key(NAMESPACE.key, None)
WORKERS = 64
SHARED_START, DOCUMENTS, DOCUMENT_TOKENS, OWN_TOKENS = 512, 2000, 2048, 1536
DONOR_TOKENS = SHARED_START + DOCUMENT_TOKENS + OWN_TOKENS
PROMPT_TOKENS, PROMPT_DOCUMENTS, PROMPTS, ROUNDS = 32_768, 8, 400, 5

# Messages in a second, for how long and how often, and lookups in a second meanwhile.
WRITES_PER_S, WRITE_SECONDS, WRITE_ROUNDS, LOOKUPS_PER_S, WRITTEN_AT_ONCE = 50_000, 2, 3, 200, 20
# Seconds that the messages may be ahead of their pace, so that a sender's pauses do not count.
AHEAD_SECONDS = 0.002
# The same for placement, in an event loop.
PLACED_TOKENS, EVENTS_PER_S, REQUESTS_PER_S, SECONDS, PLACED_ROUNDS = 8192, 20_000, 100, 3, 3


class Round(NamedTuple):
    """Milliseconds of each request, and the messages a second that the directory took meanwhile."""

    times: list[float]
    rate: float

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.times, percent))


class Fleet:
    """Donors of 64 workers in a directory, which heard of them from messages."""

    def __init__(self, donors: int) -> None:
        self._rng = np.random.default_rng(0)
        self._start = self._text(SHARED_START)
        self._documents = self._text((DOCUMENTS, DOCUMENT_TOKENS))
        self._writers = [EventWriter(Emitter(number, 0, 1), EventFormat.MSGPACK) for number in range(WORKERS)]
        self._sketches = list[bytes]()
        self.directory = Directory()
        for writer in self._writers:
            self.directory.observe(writer.reset().payload)
        for number in range(donors):
            document = self._documents[self._rng.integers(DOCUMENTS)]
            tokens = np.concatenate([self._start, document, self._text(OWN_TOKENS)])
            self._sketches.append(sketch_of(tokens, KEY).to_bytes())
            self.directory.observe(self._registered(number))

    def writes(self, count: int) -> Iterator[bytes]:
        """Return about `count` messages, made already, that evict the oldest donors and register others, in turn."""
        held, messages = len(self._sketches), list[bytes]()
        # A tenth more than is due, since a round may last a little longer.
        for number in range(count * 11 // 20):
            messages.append(self._writers[number % WORKERS].evicted(f"donor-{number}").payload)
            messages.append(self._registered(held + number))
        return iter(messages)

    def prompt(self) -> _Tokens:
        """Return a prompt of several documents, int32 [PROMPT_TOKENS]."""
        documents = self._documents[self._rng.integers(0, DOCUMENTS, PROMPT_DOCUMENTS)].ravel()
        known = len(self._start) + len(documents)
        return np.concatenate([self._start, documents, self._text(PROMPT_TOKENS - known)])

    def _registered(self, number: int) -> bytes:
        sketch, writer = self._sketches[number % len(self._sketches)], self._writers[number % WORKERS]
        return writer.registered(f"donor-{number}", NAMESPACE, "device", DONOR_TOKENS, number, sketch).payload

    def _text(self, shape: int | tuple[int, int]) -> _Tokens:
        return self._rng.integers(0, VOCABULARY, shape, dtype=np.int32)


def lookups_under_writes(directory: Directory, prompts: Iterator[Any], messages: Iterator[bytes]) -> Round:
    """Look prompts up while a thread takes messages: WRITES_PER_S where the machine can, else as fast as it can."""
    taken, is_over, began = 0, threading.Event(), time.perf_counter()

    def write() -> None:
        nonlocal taken
        while not is_over.is_set():
            if taken > WRITES_PER_S * (time.perf_counter() - began + AHEAD_SECONDS):
                time.sleep(0.001)
                continue
            for message in islice(messages, WRITTEN_AT_ONCE):
                directory.observe(message)
                taken += 1

    thread, times = threading.Thread(target=write), list[float]()
    thread.start()
    for number in range(LOOKUPS_PER_S * WRITE_SECONDS):
        time.sleep(max(0.0, began + number / LOOKUPS_PER_S - time.perf_counter()))
        times.append(seconds(directory._holders_of, next(prompts)) * 1e3)
    rate = taken / (time.perf_counter() - began)
    is_over.set()
    thread.join()
    return Round(times, rate)


def run(donors: int, results: Results) -> None:
    """Add the rows of look-ups, without the prompts' fingerprints: of the best round alone, and under writes of the
    round that kept the pace best, and then has the best 99th percentile."""
    fleet = Fleet(donors)
    directory = fleet.directory
    prompts = [directory._fingerprints(fleet.prompt(), None) for _ in range(PROMPTS)]
    if not all(map(directory._holders_of, prompts)):
        sys.exit("A prompt of known documents has no holder.")
    times = [[seconds(directory._holders_of, prompt) * 1e3 for prompt in prompts] for _ in range(ROUNDS)]
    baseline = f"{donors} donors of {DONOR_TOKENS} tokens on {WORKERS} workers, prompts of {PROMPT_TOKENS} tokens"
    results.add("directory_lookup_p99_ms", np.percentile(times, 99, axis=1).min(), "ms", baseline, 1)
    messages = fleet.writes(WRITE_ROUNDS * WRITES_PER_S * WRITE_SECONDS)
    rounds = [lookups_under_writes(directory, cycle(prompts), messages) for _ in range(WRITE_ROUNDS)]
    best = max(rounds, key=lambda each: (min(each.rate, WRITES_PER_S), -each.percentile(99)))
    baseline = (
        f"{donors} donors of which some come and go, {LOOKUPS_PER_S} lookups a second for {WRITE_SECONDS} s; of "
        f"{WRITES_PER_S} events a second this process took {best.rate:.0f}; p50 {best.percentile(50):.3f} ms, p99 of "
        f"the rounds {', '.join(f'{each.percentile(99):.2f}' for each in rounds)} ms"
    )
    results.add("directory_lookup_under_writes_p99_ms", best.percentile(99), "ms", baseline, 1)
    results.add("directory_events_per_s", best.rate, "events/s", baseline, WRITES_PER_S, "higher")


async def placed_under_writes(placement: Placement, prompts: Iterator[_Tokens], messages: Iterator[bytes]) -> Round:
    """Place requests at their pace, from when each is due, while the event loop takes messages at theirs."""
    began, taken, times = time.perf_counter(), 0, list[float]()

    async def write() -> None:
        nonlocal taken
        while True:
            is_ahead = taken > EVENTS_PER_S * (time.perf_counter() - began)
            if not is_ahead:
                placement.directory.observe(next(messages))
                taken += 1
            await asyncio.sleep(0.001 if is_ahead else 0)

    writing = asyncio.create_task(write())
    for number in range(REQUESTS_PER_S * SECONDS):
        due = began + number / REQUESTS_PER_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        placement.place(next(prompts), None, {worker: (worker, 0) for worker in range(WORKERS)}, {})
        times.append((time.perf_counter() - due) * 1e3)
    rate = taken / (time.perf_counter() - began)
    writing.cancel()
    return Round(times, rate)


def place(donors: int, results: Results) -> None:
    """Add the rows of placing, of the round with the best 99th percentile."""
    fleet, placement = Fleet(donors), Placement(None)
    placement.directory = fleet.directory
    prompts = cycle([fleet.prompt()[:PLACED_TOKENS] for _ in range(REQUESTS_PER_S)])
    messages = fleet.writes(PLACED_ROUNDS * EVENTS_PER_S * SECONDS)
    rounds = [asyncio.run(placed_under_writes(placement, prompts, messages)) for _ in range(PLACED_ROUNDS)]
    best = min(rounds, key=lambda each: each.percentile(99))
    baseline = (
        f"prompts of {PLACED_TOKENS} tokens, {donors} donors on {WORKERS} workers, {REQUESTS_PER_S} requests a second "
        f"for {SECONDS} s in an event loop that takes {best.rate:.0f} events a second; best of {PLACED_ROUNDS} rounds"
    )
    for percent, goal in ((50, 1), (99, 5)):
        results.add(f"placement_added_ms_p{percent}", best.percentile(percent), "ms", baseline, goal)


PARTS = {"fleet_directory": run, "fleet_placement": place}
main = partial(run_counted, PARTS, __doc__, [Count("donors", 100_000, "donors of the fleet")])

if __name__ == "__main__":
    main()
