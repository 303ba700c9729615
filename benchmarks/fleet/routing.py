"""Where each policy sends requests for documents that some workers hold: 4 workers, 64 documents, Zipf requests.

Time is simulated. Requests arrive at random, and a worker prefills one after the other. A prefilled document is a donor
until documents used later need its room. The rest is real: donors are sketched from token ids and announced in
messages, with a delay. The directory knows these messages alone, and placement chooses by what it finds in the
prompt. The other policies choose in turn, by load, or by the longest beginning that a worker was sent. Every prompt
begins with text of its own, so that no two share a prefix.
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.fleet.directory import NAMESPACE, VOCABULARY
from benchmarks.program import Count, run_counted
from semblend_trt.config import EventFormat
from semblend_trt.fleet.directory import Worker
from semblend_trt.fleet.events import Emitter, EventWriter
from semblend_trt.fleet.placement import Placement
from semblend_trt.fleet.publisher import EventCounters, Outbox
from semblend_trt.fleet.sketch import Held
from validation.results import Results

_Tokens = npt.NDArray[np.int32]

WORKERS, DOCUMENTS = 4, 64
SHORTEST, LONGEST = 1024, 6144
OWN_BEFORE, OWN_BEHIND = 64, 192
TOKENS_PER_S = 20_000.0
# A reused token costs this share of a computed one; events reach the directory this long after a donor is held.
REUSE_COST, EVENT_SECONDS = 0.05, 0.05
# Half of the documents fit a worker.
DONOR_TOKENS = DOCUMENTS * (SHORTEST + LONGEST) // 2 // 2
LEARNING = 0.2
POLICIES = ("round_robin", "least_loaded", "exact_prefix", "span_overlap")
PREFIX_BLOCK = 32


class Arrival(NamedTuple):
    """A request: when it comes (seconds), for which document, and its prompt."""

    at: float
    document: int
    tokens: _Tokens


class SimulatedWorker:
    """Prefills in order of arrival, keeps what it computed while there is room, and announces its donors."""

    def __init__(self, worker_id: int) -> None:
        self.worker: Worker = (worker_id, 0)
        # Requests, and how many of their tokens were expected to be computed here.
        self.waiting: deque[tuple[Arrival, int]] = deque()
        self.outstanding, self.busy_seconds, self.requests = 0, 0.0, 0
        self._outbox = Outbox(EventWriter(Emitter(worker_id, 0, 1), EventFormat.MSGPACK), EventCounters(enabled=False))
        # Donor ids by document, the one that was used last at the end.
        self._donors: OrderedDict[int, str] = OrderedDict()
        self._free_tokens, self._count = DONOR_TOKENS, 0

    def holds(self, document: int) -> bool:
        return document in self._donors

    def begin(self) -> float:
        """Start on the first that waits; return the seconds it takes."""
        arrival, _ = self.waiting[0]
        reused = len(arrival.tokens) - OWN_BEFORE - OWN_BEHIND if self.holds(arrival.document) else 0
        seconds = (len(arrival.tokens) - (1 - REUSE_COST) * reused) / TOKENS_PER_S
        self.busy_seconds += seconds
        self.requests += 1
        return seconds

    def end(self) -> tuple[Arrival, list[bytes]]:
        """End the first request that waits; return it and the messages about donors that come and go by it."""
        arrival, expected = self.waiting.popleft()
        self.outstanding -= expected
        document, tokens, changed = arrival.document, arrival.tokens, list[str]()
        if not self.holds(document):
            self._count += 1
            self._donors[document] = donor_id = f"{self.worker[0]}-{self._count}"
            self._outbox.donors[donor_id] = Held(NAMESPACE, b"", "device", len(tokens), tokens)
            self._free_tokens -= len(tokens)
            changed.append(donor_id)
        self._donors.move_to_end(document)
        while self._free_tokens < 0:
            _, gone = self._donors.popitem(last=False)
            self._free_tokens += self._outbox.donors.pop(gone).count
            changed.append(gone)
        self._outbox.changes.extend(changed)
        self._outbox.absorb(len(changed))
        return arrival, [notice.payload for notice in self._outbox.take(len(changed) + 1)]


@dataclass(slots=True)
class Outcome:
    """The results of one policy, without the first LEARNING of the requests."""

    to_holder: list[bool] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)

    @property
    def imbalance(self) -> float:
        """Return the busiest worker's time over the mean."""
        return float(max(self.busy_seconds) / np.mean(self.busy_seconds))


def arrivals_of(requests: int) -> list[Arrival]:
    """Return requests at random times, all of which the workers could just serve if they reused nothing."""
    rng = np.random.default_rng(0)
    documents = [_text(rng, int(length)) for length in rng.integers(SHORTEST, LONGEST, DOCUMENTS)]
    popularity = 1 / np.arange(1, DOCUMENTS + 1)
    chosen = rng.choice(DOCUMENTS, requests, p=popularity / popularity.sum())
    prompts = [np.concatenate([_text(rng, OWN_BEFORE), documents[each], _text(rng, OWN_BEHIND)]) for each in chosen]
    mean = float(np.mean([len(prompt) for prompt in prompts]))
    gaps = rng.exponential(mean / (WORKERS * TOKENS_PER_S), requests)
    return list(map(Arrival, np.cumsum(gaps).tolist(), chosen.tolist(), prompts))


class Policy:
    """One of POLICIES: chooses a worker, and says how many of the prompt's tokens it is expected to hold."""

    def __init__(self, name: str) -> None:
        self._name, self.placement = name, Placement(None)
        self._sent: dict[int, set[int]] = {number: set() for number in range(WORKERS)}

    def choose(self, tokens: _Tokens, load: dict[int, float]) -> tuple[int, int]:
        known = tokens if self._name == "span_overlap" else None
        beginnings = [hash(tokens[:end].tobytes()) for end in range(PREFIX_BLOCK, len(tokens) + 1, PREFIX_BLOCK)]
        if self._name == "exact_prefix":
            longest = {name: sum(each in sent for each in beginnings) for name, sent in self._sent.items()}
            load = {name: each for name, each in load.items() if longest[name] == max(longest.values())}
        elif self._name == "round_robin":
            load = dict.fromkeys(load, 0.0)
        best = self.placement.place(known, None, {name: (name, 0) for name in load}, load)[0]
        self._sent[best.name].update(beginnings)
        return best.name, best.held


def simulate(policy: Policy, arrivals: list[Arrival]) -> Outcome:
    """Send all requests through a policy."""
    workers, outcome = [SimulatedWorker(number) for number in range(WORKERS)], Outcome()
    directory = policy.placement.directory
    # (time, order, what happens): a worker's number ends its first request, bytes are a message.
    due: list[tuple[float, int, int | bytes | Arrival]] = [(each.at, -1, each) for each in arrivals]
    heapq.heapify(due)
    counted_from, order = arrivals[int(LEARNING * len(arrivals))].at, 0
    busy_before = [0.0] * WORKERS
    while due:
        now, _, what = heapq.heappop(due)
        order += 1
        if isinstance(what, bytes):
            directory.observe(what)
        elif isinstance(what, int):
            worker = workers[what]
            arrival, messages = worker.end()
            if arrival.at >= counted_from:
                outcome.waits.append(now - arrival.at)
            for message in messages:
                heapq.heappush(due, (now + EVENT_SECONDS, order, message))
                order += 1
            if worker.waiting:
                heapq.heappush(due, (now + worker.begin(), order, what))
        else:
            chosen, held = policy.choose(what.tokens, {at: each.outstanding for at, each in enumerate(workers)})
            worker = workers[chosen]
            if what.at == counted_from:
                busy_before = [each.busy_seconds for each in workers]
            if what.at >= counted_from:
                outcome.to_holder.append(worker.holds(what.document))
            expected = max(0, len(what.tokens) - held)
            worker.outstanding += expected
            worker.waiting.append((what, expected))
            if len(worker.waiting) == 1:
                heapq.heappush(due, (now + worker.begin(), order, worker.worker[0]))
    outcome.busy_seconds = [each.busy_seconds - before for each, before in zip(workers, busy_before, strict=True)]
    return outcome


def run(requests: int, results: Results) -> None:
    """Add three rows for each policy."""
    arrivals = arrivals_of(requests)
    baseline = (
        f"{requests} Zipf requests for {DOCUMENTS} documents, half of which fit each of {WORKERS} workers, "
        "at the rate that these could just serve without reuse"
    )
    for name in POLICIES:
        outcome = simulate(Policy(name), arrivals)
        end, goals = ("", (0.95, 1.3)) if name == "span_overlap" else (f"_{name}", (None, None))
        share, p95 = float(np.mean(outcome.to_holder)), float(np.percentile(outcome.waits, 95)) * 1e3
        results.add(f"routed_to_holder_share{end}", share, "share", baseline, goals[0], "higher")
        results.add(f"routed_imbalance{end}", outcome.imbalance, "ratio", baseline, goals[1])
        results.add(f"routed_first_token_p95_ms{end}", p95, "ms", baseline)


def _text(rng: np.random.Generator, length: int) -> _Tokens:
    return rng.integers(0, VOCABULARY, length, dtype=np.int32)


main = partial(run_counted, {"fleet_routing": run}, __doc__, [Count("requests", 5000, "requests")])

if __name__ == "__main__":
    main()
