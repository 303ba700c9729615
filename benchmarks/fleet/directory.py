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
from itertools import islice

import numpy as np
import numpy.typing as npt

from benchmarks.program import Count, run_counted
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
PROMPT_TOKENS, PROMPT_DOCUMENTS, PROMPTS, ROUNDS = 32_768, 8, 400, 5

# Messages in a second, for how long and how often, and lookups in a second meanwhile.
WRITES_PER_S, WRITE_SECONDS, WRITE_ROUNDS, LOOKUPS_PER_S, WRITTEN_AT_ONCE = 50_000, 2, 3, 200, 20
# Seconds that the messages may be ahead of their pace, so that a sender's pauses do not count.
AHEAD_SECONDS = 0.002


class Fleet:
    """Donors of 64 workers in a directory, which heard of them from messages."""

    def __init__(self, donors: int) -> None:
        self._rng = np.random.default_rng(0)
        self._start = self._text(SHARED_START)
        self._documents = self._text(DOCUMENTS * DOCUMENT_TOKENS).reshape(DOCUMENTS, DOCUMENT_TOKENS)
        self.sketches: list[bytes] = []
        self.directory = Directory()
        self._writers = [EventWriter(Emitter(number, 0, 1), EventFormat.MSGPACK) for number in range(WORKERS)]
        for writer in self._writers:
            self.directory.observe(writer.reset())
        for number in range(donors):
            document = self._documents[self._rng.integers(DOCUMENTS)]
            tokens = np.concatenate([self._start, document, self._text(OWN_TOKENS)])
            sketch = sketch_of(tokens, KEY).to_bytes()
            self.sketches.append(sketch)
            self.directory.observe(self._registered(number, sketch))

    def writes(self, count: int) -> list[bytes]:
        """Return messages that evict the oldest donors and register others, in turn."""
        held, messages = len(self.sketches), []
        for number in range(count // 2):
            messages.append(self._writers[number % WORKERS].evicted(f"donor-{number}"))
            messages.append(self._registered(held + number, self.sketches[number % held]))
        return messages

    def _registered(self, number: int, sketch: bytes) -> bytes:
        tokens = SHARED_START + DOCUMENT_TOKENS + OWN_TOKENS
        writer = self._writers[number % WORKERS]
        return writer.registered(f"donor-{number}", NAMESPACE, "device", tokens, number, sketch)

    def prompt(self) -> _Tokens:
        """Return a prompt of several documents, int32 [PROMPT_TOKENS]."""
        documents = [self._documents[each] for each in self._rng.integers(0, DOCUMENTS, PROMPT_DOCUMENTS)]
        known = np.concatenate([self._start, *documents])
        return np.concatenate([known, self._text(PROMPT_TOKENS - len(known))])

    def _text(self, length: int) -> _Tokens:
        return self._rng.integers(0, VOCABULARY, length, dtype=np.int32)


def lookup_p99_ms(fleet: Fleet) -> float:
    """Return the 99th percentile of a lookup's milliseconds, without the prompt's fingerprints, in the best round."""
    directory, p99s = fleet.directory, []
    prompts = [directory._fingerprints(fleet.prompt(), None) for _ in range(PROMPTS)]
    for _ in range(ROUNDS):
        times = []
        for prompt in prompts:
            began = time.perf_counter()
            held = directory._holders_of(prompt)
            times.append((time.perf_counter() - began) * 1e3)
            if not held:
                sys.exit("A prompt of known documents has no holder.")
        p99s.append(float(np.percentile(times, 99)))
    return min(p99s)


def lookups_under_writes(fleet: Fleet, messages: Iterator[bytes]) -> tuple[npt.NDArray[np.float64], float]:
    """Return each lookup's milliseconds, float64 [lookups], and the messages a second that the directory took
    meanwhile. It takes them at WRITES_PER_S where the machine can, else as fast as it can."""
    directory = fleet.directory
    prompts = [directory._fingerprints(fleet.prompt(), None) for _ in range(PROMPTS)]
    taken, is_over, began = 0, threading.Event(), time.perf_counter()

    def write() -> None:
        nonlocal taken
        while not is_over.is_set():
            if taken > WRITES_PER_S * (time.perf_counter() - began + AHEAD_SECONDS):
                time.sleep(0.001)
            else:
                for message in islice(messages, WRITTEN_AT_ONCE):
                    directory.observe(message)
                    taken += 1

    thread, times = threading.Thread(target=write), []
    thread.start()
    for number in range(LOOKUPS_PER_S * WRITE_SECONDS):
        time.sleep(max(0.0, began + number / LOOKUPS_PER_S - time.perf_counter()))
        asked = time.perf_counter()
        directory._holders_of(prompts[number % PROMPTS])
        times.append((time.perf_counter() - asked) * 1e3)
    rate = taken / (time.perf_counter() - began)
    is_over.set()
    thread.join()
    return np.array(times), rate


def run(donors: int, results: Results) -> None:
    """Add the rows of both measurements."""
    fleet = Fleet(donors)
    baseline = (
        f"{donors} donors of {SHARED_START + DOCUMENT_TOKENS + OWN_TOKENS} tokens on {WORKERS} workers, "
        f"prompts of {PROMPT_TOKENS} tokens"
    )
    results.add("directory_lookup_p99_ms", lookup_p99_ms(fleet), "ms", goal=1, baseline=baseline)
    add_writes(donors, fleet, results)


def add_writes(donors: int, fleet: Fleet, results: Results) -> None:
    """Add the rows of the lookups under writes, of the round that kept the pace best, and then has the best p99."""
    # A tenth more than is due, since a round may last a little longer.
    messages = iter(fleet.writes(WRITE_ROUNDS * min(WRITES_PER_S * WRITE_SECONDS, donors) * 11 // 10))
    rounds = [lookups_under_writes(fleet, messages) for _ in range(WRITE_ROUNDS)]
    p99s = [float(np.percentile(times, 99)) for times, _ in rounds]
    best = max(range(WRITE_ROUNDS), key=lambda number: (min(rounds[number][1], WRITES_PER_S), -p99s[number]))
    p99, (times, rate) = p99s[best], rounds[best]
    baseline = (
        f"{donors} donors of which some come and go, {LOOKUPS_PER_S} lookups a second for {WRITE_SECONDS} s; of "
        f"{WRITES_PER_S} events a second this process took {rate:.0f}; p50 {np.median(times):.3f} ms, p99 of the "
        f"rounds {', '.join(f'{each:.2f}' for each in p99s)} ms"
    )
    results.add("directory_lookup_under_writes_p99_ms", p99, "ms", goal=1, baseline=baseline)
    results.add("directory_events_per_s", rate, "events/s", better="higher", goal=WRITES_PER_S, baseline=baseline)


# What placing adds to a request in a gateway.
PLACED_TOKENS, EVENTS_PER_S, REQUESTS_PER_S, SECONDS, PLACED_ROUNDS = 8192, 20_000, 100, 3, 3
_CANDIDATES = {number: (number, 0) for number in range(WORKERS)}


async def milliseconds_added(fleet: Fleet, messages: Iterator[bytes]) -> tuple[list[float], float]:
    """Return each request's milliseconds, and the events a second that the loop took meanwhile."""
    placement = Placement(None)
    placement.directory = fleet.directory
    prompts = [fleet.prompt()[:PLACED_TOKENS] for _ in range(REQUESTS_PER_S)]
    began, taken, times = time.perf_counter(), 0, []

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
        placement.place(prompts[number % len(prompts)], None, _CANDIDATES, {})
        times.append((time.perf_counter() - due) * 1e3)
    rate = taken / (time.perf_counter() - began)
    writing.cancel()
    return times, rate


def place(donors: int, results: Results) -> None:
    """Add the rows of placing, of the round with the best 99th percentile."""
    fleet = Fleet(donors)
    messages = iter(fleet.writes(PLACED_ROUNDS * min(EVENTS_PER_S * SECONDS, donors) * 11 // 10))
    rounds = [asyncio.run(milliseconds_added(fleet, messages)) for _ in range(PLACED_ROUNDS)]
    times, rate = min(rounds, key=lambda each: float(np.percentile(each[0], 99)))
    baseline = (
        f"prompts of {PLACED_TOKENS} tokens, {donors} donors on {WORKERS} workers, {REQUESTS_PER_S} requests a second "
        f"for {SECONDS} s in an event loop that takes {rate:.0f} events a second; best of {PLACED_ROUNDS} rounds"
    )
    for percent, goal in ((50, 1), (99, 5)):
        value = float(np.percentile(times, percent))
        results.add(f"placement_added_ms_p{percent}", value, "ms", goal=goal, baseline=baseline)


PARTS = {"fleet_directory": run, "fleet_placement": place}
main = partial(run_counted, PARTS, __doc__, [Count("donors", 100_000, "donors of the fleet")])


if __name__ == "__main__":
    main()
