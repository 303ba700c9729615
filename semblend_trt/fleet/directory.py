"""Directory: how much of a prompt each worker of the fleet holds, according to the workers' events.

The directory checks, bounds and counts all input. A wrong or forged event can only misplace requests for a while. Only
the reader's own clocks count. The directory forgets a worker after HEARTBEATS_MISSED intervals without an accepted
event, or after that number of rejected heartbeats in its name. It then accepts any generation, so a forgery misleads it
no longer than that."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np

from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.events import (
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorsPurged,
    EventError,
    ProviderGenerationReset,
    ProviderHeartbeat,
    UnknownEvent,
    decode,
    donor_digest,
)
from semblend_trt.fleet.sketch import DEFAULT_ENTRIES, Sketch, fingerprints_of, sketch_key
from semblend_trt.fleet.sketch_index import Posting, SketchIndex, warm_up
from semblend_trt.namespace import (
    NO_SALT,
    SALT_PREFIX,
    TENANT_PREFIX,
    CacheNamespace,
    is_content,
    salt_digest,
    tenant_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from semblend_trt.fleet.events import Event
    from semblend_trt.fleet.sketch import PromptFingerprints

# (worker_id, dp_rank)
Worker: TypeAlias = tuple[int, int]

MAX_WORKERS = 1024
MAX_DONORS = 131_072
MAX_NAMESPACES = 16384
# Least seconds between two requests for a worker's resync.
RESYNC_SECONDS = 10.0
# Namespaces searched for a request. One tenant and model has several only where adapters or engines differ.
_MAX_MET = 8
# The seconds between two heartbeats until a worker states them, and the bounds of what it may state.
FIRST_INTERVAL, SHORTEST_INTERVAL, LONGEST_INTERVAL = 20.0, 0.1, 60.0
# Heartbeats missed, or rejected, after which the directory forgets a worker.
HEARTBEATS_MISSED = 3
# Heartbeats of an earlier generation after which its process counts as alive.
_RIVAL_HEARTBEATS = 2
# A generation is a time in microseconds. One further ahead of this reader's clock replaces no other.
MOST_AHEAD_US = 86_400_000_000
# Seconds between two checks for silent workers.
_LOOK_SECONDS = 0.05
# Two live processes have the worker's id; no event came for longer than its heartbeats say; events are missing.
LIVE_PROBLEMS = ("id_twice", "old_events", "unsynced")
# Heartbeat intervals after which a worker's events are old.
_OLD = 1.5
# Donors of retired numbers that are removed from the indexes with each event or look-up.
_REMOVED_AT_ONCE = 8


def worker_name(worker: Worker) -> str:
    """Return a worker's id and rank as text, as `semblend-trt events` writes them."""
    return f"{worker[0]}.{worker[1]}"


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker whose donors together hold an estimated `tokens` of a prompt's tokens."""

    worker: Worker
    tokens: int


@dataclass(slots=True, eq=False)
class KnownNamespace:
    """A namespace, the digest of its salt, the number and sketches of its donors."""

    fields: CacheNamespace
    salt: str
    donors: int = 0
    index: SketchIndex = field(default_factory=SketchIndex)


@functools.lru_cache(maxsize=1024)
def _identity(spelling: bytes) -> tuple[CacheNamespace, str]:
    """Return a namespace in MessagePack, and its salt's digest. Donors with the same bytes share one cache entry."""
    namespace = CacheNamespace.from_dict(msgspec.msgpack.decode(spelling))
    salt, unsalted = str(namespace.extra.get("cache_salt", NO_SALT)), tenant_key(None)
    expected = unsalted if salt in (NO_SALT, salt_digest("")) else TENANT_PREFIX + salt.removeprefix(SALT_PREFIX)
    if namespace.extra.get("tenant_key", expected) != expected:
        raise NamespaceError("the namespace's tenant key is not that of its salt; use CacheNamespace.for_request()")
    return namespace, salt


# No cycle goes through a donor, and the garbage collector would look at a hundred thousand of them.
class FollowedDonor(msgspec.Struct, gc=False):
    """A donor as it was announced, its `donor_digest`, and its posting in the index of its namespace."""

    tier: str
    tokens: int
    digest: int
    namespace: KnownNamespace | None = None
    posting: Posting | None = None


@dataclass(slots=True, eq=False)
class FollowedWorker:
    """A worker: its number in the indexes, its last event, its donors by id and the XOR of their `donor_digest`.

    `is_synced`: no event was missed since its last reset. `unheeded` counts heartbeats rejected since the last accepted
    event. `compared` counts heartbeats compared with the donors. `rival`: the earlier generation of the last stale
    heartbeat, the number of such in a row, and when it came."""

    number: int
    generation: int = 0
    last_id: int = 0
    is_synced: bool = False
    seen_at: float = 0.0
    interval: float = FIRST_INTERVAL
    donors: dict[str, FollowedDonor] = field(default_factory=dict)
    digest: int = 0
    asked_at: float = float("-inf")
    wants_resync: bool = False
    unheeded: int = 0
    rival: tuple[int, int, float] = (0, 0, float("-inf"))
    events: Counter[str] = field(default_factory=Counter)
    compared: int = 0


class FairLock:
    """A lock that a waiting thread gets before one that asks again at once.

    `threading.Lock` goes to a running thread, so a thread that takes it in a loop would keep others out. Here the
    waiting thread holds the turn, so that no other thread can ask."""

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _is_twice(followed: FollowedWorker, now: float) -> bool:
    _, beats, at = followed.rival
    return beats >= _RIVAL_HEARTBEATS and now - at <= HEARTBEATS_MISSED * followed.interval


# How an event relates to the events before it. `reset`: the worker's donors are forgotten, and registered again; `gap`:
# a resync is asked for; `refused`: it is of one worker too many, or not plausible. The first three are applied.
Verdict: TypeAlias = Literal["reset", "next", "gap", "duplicate", "stale", "refused"]
APPLIED = ("reset", "next", "gap")
_MEANING = {
    "gap": "events before it are missing",
    "duplicate": "was seen already, or comes too late",
    "stale": "is of an earlier generation; two processes may have this worker id",
}


class Directory:
    """Takes messages with `observe` and answers with `holders`.

    Thread safe; only `holders` raises. `clock` (monotonic seconds) times expiry and resync requests. `counts` counts
    messages by verdict and problem; `on_problem` gets each problem's name and a sentence."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_problem: Callable[[str, str], None] = lambda _reason, _sentence: None,
    ) -> None:
        self._clock, self._on_problem = clock, on_problem
        self._lock = FairLock()
        self._workers: dict[Worker, FollowedWorker] = {}
        self._by_number: list[Worker | None] = []
        self._free_numbers: list[int] = []
        # Retired numbers, and the donors that are still in the indexes under them.
        self._cleared: deque[tuple[int, list[FollowedDonor]]] = deque()
        self._namespaces: dict[str, KnownNamespace] = {}
        self._of_salt: dict[str, list[KnownNamespace]] = {}
        self._donors = self._entries = 0
        self._expire_at = float("-inf")
        self.counts: Counter[str] = Counter()
        warm_up()

    def observe(self, payload: bytes, sender: str | None = None) -> Verdict | None:
        """Take one message and return its verdict, None for no event. Refuse workers other than a given `sender`."""
        try:
            event = decode(payload)
        except EventError as error:
            with self._lock:
                self._problem(error.reason, str(error))
            return None
        worker = (event.worker_id, event.dp_rank)
        with self._lock:
            if sender is not None and str(event.worker_id) != sender:
                self._problem("wrong_subject", f"came on the subject of worker {sender}", event)
                return "refused"
            now, is_known = self._expire(), worker in self._workers
            verdict = self._judged(event, worker)
            if is_known and verdict not in APPLIED and isinstance(event.data, ProviderHeartbeat):
                self._reject(event, worker, verdict, now)
                verdict = verdict if worker in self._workers else self._judged(event, worker)
            if is_known and verdict in _MEANING:
                self._problem(verdict, _MEANING[verdict], event)
            else:
                self.counts[verdict] += 1
            if verdict in APPLIED:
                self._take(event, worker, verdict, now)
        return verdict

    def holders(
        self, token_ids: npt.ArrayLike, *, tenant_salt: str | None = None, tokenizer: str | None = None
    ) -> tuple[Holder, ...]:
        """Return the workers that hold text of a prompt (integers [n]), the largest share first.

        `tokens` are estimated over all donors of a worker in one namespace: text that two of them hold counts once.
        Donors must have the same raw `tenant_salt`; those of engines whose tokenizer has another digest than
        `tokenizer` do not count. Raise ValueError for bad tokens, NamespaceError for a bad salt."""
        prompts = self._fingerprints(token_ids, tenant_salt, tokenizer)
        return self._holders_of(prompts) if prompts else ()

    def workers(self) -> dict[Worker, FollowedWorker]:
        """Return the followed workers by id and rank. For reading only: they go on changing."""
        with self._lock:
            self._expire()
            return dict(sorted(self._workers.items()))

    def twice(self) -> set[Worker]:
        """Return the workers whose id two live processes have. Their text counts as held nowhere."""
        with self._lock:
            now = self._clock()
            return {worker for worker, followed in self._workers.items() if _is_twice(followed, now)}

    def status(self) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
        """Return the followed workers, each as a row of `semblend-trt fleet status`: its donors, their tokens by tier
        and so on. Return also, by problem (LIVE_PROBLEMS), a sentence for each worker that has it."""
        known, problems = [], defaultdict[str, list[str]](list)
        twice, now = self.twice(), self._clock()
        for worker, followed in self.workers().items():
            name, silent, tokens = worker_name(worker), now - followed.seen_at, Counter[str]()
            donors = list(followed.donors.values())
            for donor in donors:
                tokens[donor.tier] += donor.tokens
            tenants = len({donor.namespace.salt for donor in donors if donor.namespace is not None})
            held = {"donors": len(donors), "tokens": dict(tokens), "tenants": tenants}
            heard = {"events": dict(followed.events), "heartbeats_compared": followed.compared}
            row = {"name": name, "generation": followed.generation, **held, **heard, "silent_seconds": round(silent, 3)}
            known.append(row)
            if worker in twice:
                problems["id_twice"].append(f"two live processes say that they are worker {name}; give each its own id")
            if silent > _OLD * followed.interval:
                sentence = f"worker {name} has said nothing for {silent:.1f} s, and promised a heartbeat each"
                problems["old_events"].append(f"{sentence} {followed.interval:g} s")
            if not followed.is_synced:
                problems["unsynced"].append(f"events of worker {name} are missing, and it has not sent them again")
        return known, dict(problems)

    def resyncs_due(self) -> tuple[Worker, ...]:
        """Return the workers to ask for a resync, each once per RESYNC_SECONDS or (shorter) heartbeat interval."""
        with self._lock:
            now, due = self._expire(), []
            for worker, followed in self._workers.items():
                is_needed = followed.wants_resync or not followed.is_synced
                if is_needed and now - followed.asked_at >= min(RESYNC_SECONDS, followed.interval):
                    followed.asked_at, followed.wants_resync = now, False
                    due.append(worker)
            return tuple(due)

    # Two methods, so that a benchmark can time each.
    def _fingerprints(
        self, token_ids: npt.ArrayLike, salt: str | None, tokenizer: str | None = None
    ) -> list[tuple[KnownNamespace, PromptFingerprints]]:
        with self._lock:
            self._expire()
            of_salt = self._of_salt.get(NO_SALT if salt is None else salt_digest(salt), ())
            own = ((each, each.fields.tokenizer_revision) for each in of_salt)
            fit = (each for each, other in own if tokenizer in (None, other) or not is_content(other))
            met = sorted(fit, key=lambda each: -each.donors)[:_MAX_MET]
        prompts = fingerprints_of(token_ids, [sketch_key(each.fields.key, salt) for each in met]) if met else []
        return list(zip(met, prompts, strict=True))

    def _holders_of(self, prompts: list[tuple[KnownNamespace, PromptFingerprints]]) -> tuple[Holder, ...]:
        with self._lock:
            now, workers = self._clock(), list(self._by_number)
            for followed in self._workers.values():
                if _is_twice(followed, now):
                    workers[followed.number] = None
            shares = np.zeros(len(workers))
            for namespace, prompt in prompts:
                np.maximum(shares, namespace.index.search(len(shares), prompt), out=shares)
        tokens = np.rint(shares * prompts[0][1].tokens).astype(int).tolist()
        held = [Holder(who, count) for who, count in zip(workers, tokens, strict=True) if count and who is not None]
        return tuple(sorted(held, key=lambda holder: (-holder.tokens, holder.worker)))

    # -- callers hold the lock -------------------------------------------------------------------------------------

    def _problem(self, reason: str, sentence: str, event: Event | None = None) -> None:
        self.counts[reason] += 1
        who = "" if event is None else f"worker {event.worker_id}.{event.dp_rank}, event {event.event_id}: "
        self._on_problem(reason, who + sentence)

    def _judged(self, event: Event, worker: Worker) -> Verdict:
        followed, is_reset = self._workers.get(worker), isinstance(event.data, ProviderGenerationReset)
        if followed is None:
            if len(self._workers) < MAX_WORKERS:
                return "reset" if is_reset else "gap"
            self._problem("too_many_workers", f"{MAX_WORKERS} workers are followed, which is the most", event)
            return "refused"
        # An event of unknown kind may name no generation.
        generation = followed.generation if event.generation is None else event.generation
        if generation < followed.generation:
            return "stale"
        if generation > followed.generation:
            if generation > time.time() * 1e6 + MOST_AHEAD_US:
                self._problem("future_generation", f"generation {generation} begins more than a day from now", event)
                return "refused"
            if is_reset:
                return "reset"
            # A restarted worker whose reset was missed sends another one when asked.
            followed.wants_resync = True
            self._problem("unproven_generation", f"generation {generation} began with no reset", event)
            return "refused"
        if event.event_id <= followed.last_id:
            return "duplicate"
        if is_reset:
            return "reset"
        return "gap" if event.event_id > followed.last_id + 1 else "next"

    def _reject(self, event: Event, worker: Worker, verdict: Verdict, now: float) -> None:
        """Count a rejected heartbeat; forget the worker at HEARTBEATS_MISSED, so that live workers undo forgeries."""
        followed = self._workers[worker]
        if verdict == "stale":  # a process that has ended sends no second one
            generation, beats, _ = followed.rival
            beats = beats + 1 if generation == event.generation else 1
            followed.rival = (event.generation or 0, beats, now)
            if beats >= _RIVAL_HEARTBEATS:
                sentence = "two live processes have this worker id, and neither's text is found; give each its own"
                self._problem("id_twice", sentence, event)
        followed.unheeded += 1
        if followed.unheeded >= HEARTBEATS_MISSED:
            self._forget(worker)

    def _take(self, event: Event, worker: Worker, verdict: Verdict, now: float) -> None:
        data = event.data
        if (followed := self._workers.get(worker)) is None:
            followed = self._workers[worker] = FollowedWorker(self._number_for(worker))
        if event.generation is not None:
            followed.generation = event.generation
        # A worker without a reset, or of which an event was missed, is synced by its next reset.
        followed.is_synced = verdict == "reset" or (followed.is_synced and verdict == "next")
        followed.last_id = event.event_id
        followed.seen_at, followed.unheeded = now, 0
        followed.events["unknown" if isinstance(event, UnknownEvent) else event.data.kind] += 1
        if isinstance(data, DonorRegistered):
            self._register(event, followed, data)
        elif isinstance(data, (DonorEvicted, DonorRelocated)):
            self._change(event, followed, data)
        elif isinstance(data, (ProviderGenerationReset, DonorsPurged)):
            self._retire(followed)
            followed.number = self._number_for(worker)
        elif isinstance(data, ProviderHeartbeat):
            self._compare(event, followed, data)
        else:
            self.counts["unknown_kind"] += 1

    def _register(self, event: Event, followed: FollowedWorker, data: DonorRegistered) -> None:
        self._drop(followed, data.donor_id)
        if self._donors >= MAX_DONORS:
            self._problem("too_many_donors", f"{MAX_DONORS} donors are known, which is the most", event)
            return
        tier = data.location.tier
        donor = FollowedDonor(tier, data.token_count, donor_digest(data.donor_id, tier))
        followed.donors[data.donor_id] = donor
        followed.digest ^= donor.digest
        self._donors += 1
        try:
            sketch = Sketch.from_bytes(data.segments[0].provider_metadata)  # of the whole donor
            donor.namespace = self._entered(data.namespace)
        except (NamespaceError, RecursionError) as error:
            self._problem("bad_namespace", str(error), event)
        except ValueError as error:
            self._problem("no_sketch", str(error), event)
        else:
            if self._entries + len(sketch.entries) > DEFAULT_ENTRIES * MAX_DONORS:
                self._problem("index_full", "the index has no room for its sketch", event)
            else:
                donor.posting = donor.namespace.index.add(followed.number, sketch)
                self._entries += len(donor.posting.entries)

    def _change(self, event: Event, followed: FollowedWorker, data: DonorEvicted | DonorRelocated) -> None:
        if (donor := followed.donors.get(data.donor_id)) is None:
            if followed.is_synced:
                self._problem("unknown_donor", "names a donor that was never registered", event)
        elif isinstance(data, DonorRelocated):
            followed.digest ^= donor.digest
            donor.tier = data.new_location.tier
            donor.digest = donor_digest(data.donor_id, donor.tier)
            followed.digest ^= donor.digest
        elif data.segments is None:
            self._drop(followed, data.donor_id)
        else:  # the sketch does not say which part is left
            self._take_back(donor)

    def _compare(self, event: Event, followed: FollowedWorker, heartbeat: ProviderHeartbeat) -> None:
        followed.interval = min(max(heartbeat.interval_seconds, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        if not followed.is_synced:
            return
        followed.compared += 1
        lacking = heartbeat.donor_count - len(followed.donors)
        # Donors for which there is no room are not asked for.
        if lacking <= MAX_DONORS - self._donors and (lacking, heartbeat.state_digest) != (0, followed.digest):
            followed.is_synced = False
            sentence = f"reports {heartbeat.donor_count} donors where its events leave {len(followed.donors)}"
            self._problem("wrong_state", sentence, event)

    def _drop(self, followed: FollowedWorker, donor_id: str) -> None:
        if (donor := followed.donors.pop(donor_id, None)) is not None:
            self._take_back(donor)
            followed.digest ^= donor.digest
            self._donors -= 1

    def _entered(self, values: Mapping[str, Any]) -> KnownNamespace:
        """Return the namespace with these `values`, and count a donor. Raise NamespaceError for bad values, a tenant
        key that does not match the salt, and too many namespaces."""
        fields, salt = _identity(msgspec.msgpack.encode(values))
        if (known := self._namespaces.get(fields.key)) is None:
            if len(self._namespaces) >= MAX_NAMESPACES:
                raise NamespaceError(f"donors are in more than {MAX_NAMESPACES} namespaces; no more are kept")
            known = self._namespaces[fields.key] = KnownNamespace(fields, salt)
            self._of_salt.setdefault(salt, []).append(known)
        known.donors += 1
        return known

    def _take_back(self, donor: FollowedDonor) -> None:
        """Remove a donor from its index and its namespace; forget a namespace without donors."""
        known, posting = donor.namespace, donor.posting
        donor.namespace = donor.posting = None
        if known is None:
            return
        known.donors -= 1
        if posting is not None:
            self._entries -= len(posting.entries)
            known.index.remove(posting)
        if not known.donors:
            del self._namespaces[known.fields.key]
            self._of_salt[known.salt].remove(known)
            if not self._of_salt[known.salt]:
                del self._of_salt[known.salt]

    def _retire(self, followed: FollowedWorker) -> None:
        """Forget all donors of a worker at once: its number names no worker, and is free once the indexes are clear."""
        self._by_number[followed.number] = None
        self._cleared.append((followed.number, list(followed.donors.values())))
        self._donors -= len(followed.donors)
        followed.donors, followed.digest = {}, 0

    def _forget(self, worker: Worker) -> None:
        self._retire(self._workers.pop(worker))
        self.counts["expired"] += 1

    def _number_for(self, worker: Worker) -> int:
        if not self._free_numbers:
            self._free_numbers.append(len(self._by_number))
            self._by_number.append(None)
        number = self._free_numbers.pop()
        self._by_number[number] = worker
        return number

    def _expire(self) -> float:
        """Forget silent workers, and take a few donors of retired numbers out of the indexes; return the time."""
        now = self._clock()
        if self._cleared:
            number, donors = self._cleared[0]
            for _ in range(min(_REMOVED_AT_ONCE, len(donors))):
                self._take_back(donors.pop())
            if not donors:
                self._cleared.popleft()
                self._free_numbers.append(number)
        if now >= self._expire_at:
            self._expire_at = now + _LOOK_SECONDS
            for worker, followed in list(self._workers.items()):
                if now - followed.seen_at > HEARTBEATS_MISSED * followed.interval:
                    self._forget(worker)
        return now
