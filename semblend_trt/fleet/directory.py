"""Directory: how much of a prompt each worker of the fleet holds, according to the workers' events.

All input is checked, bounded and counted; a wrong or forged event can misplace requests for a while and nothing else.
Only this reader's clocks are used. A worker is forgotten after HEARTBEATS_MISSED intervals without an accepted event,
or after as many heartbeats in its name that were not accepted. Any generation is accepted then, so that a forgery
misleads a reader for those heartbeats at most.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.events import (
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorsPurged,
    ProviderGenerationReset,
    ProviderHeartbeat,
    UnknownEvent,
    decode,
)
from semblend_trt.fleet.routing_policy import Holder
from semblend_trt.fleet.sketch import DEFAULT_ENTRIES, Sketch, fingerprints_of, sketch_key
from semblend_trt.fleet.sketch_index import Posting, SketchIndex, warm_up
from semblend_trt.fleet.wire import EventError, donor_digest
from semblend_trt.namespace import NO_SALT, SALT_PREFIX, TENANT_PREFIX, CacheNamespace, salt_digest, tenant_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from semblend_trt.fleet.events import Event
    from semblend_trt.fleet.routing_policy import Worker
    from semblend_trt.fleet.sketch import PromptFingerprints

MAX_WORKERS = 1024
MAX_DONORS = 131_072
MAX_NAMESPACES = 16384
# Seconds between two requests for a worker's resync, at least.
RESYNC_SECONDS = 10.0
# Namespaces searched for a request. One tenant and model has several only where adapters or engines differ.
_MAX_MET = 8
# The seconds between two heartbeats until a worker states them, and the bounds of what it may state.
FIRST_INTERVAL, SHORTEST_INTERVAL, LONGEST_INTERVAL = 20.0, 0.1, 60.0
# Heartbeats missed, or not accepted, after which a worker is forgotten.
HEARTBEATS_MISSED = 3
# A generation is a time in microseconds. One further ahead of this reader's clock replaces no other.
MOST_AHEAD_US = 86_400_000_000
# Seconds between two checks for silent workers.
_LOOK_SECONDS = 0.05
# Donors of cleared workers that are removed from the index with each event.
_REMOVED_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class KnownNamespace:
    """A namespace: its key, its salt's digest, the number and sketches of its donors."""

    key: str
    salt: str
    donors: int = 0
    index: SketchIndex = field(default_factory=SketchIndex)


class KnownNamespaces:
    """The namespaces of the known donors. Not thread safe."""

    def __init__(self) -> None:
        self._by_key: dict[str, KnownNamespace] = {}
        self._by_salt: dict[str, dict[str, KnownNamespace]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._by_key) >= MAX_NAMESPACES

    def enter(self, values: Mapping[str, Any]) -> KnownNamespace:
        """Adds a donor to the namespace with these `values`.

        Raises NamespaceError for bad values, for a tenant key that does not match the salt, and for too many
        namespaces.
        """
        key, salt = _key_and_salt(msgspec.msgpack.encode(values))
        known = self._by_key.get(key)
        if known is None:
            if self.is_full:
                raise NamespaceError(f"donors are in more than {MAX_NAMESPACES} namespaces; no more are kept")
            known = self._by_key[key] = KnownNamespace(key, salt)
            self._by_salt.setdefault(salt, {})[key] = known
        known.donors += 1
        return known

    def leave(self, known: KnownNamespace) -> None:
        """Removes a donor; a namespace without donors is forgotten."""
        known.donors -= 1
        if not known.donors:
            del self._by_key[known.key]
            del self._by_salt[known.salt][known.key]
            if not self._by_salt[known.salt]:
                del self._by_salt[known.salt]

    def met_by(self, salt: str | None) -> list[KnownNamespace]:
        """The namespaces that a request with this raw salt may reuse from, at most _MAX_MET, most donors first.

        Raises NamespaceError for a salt that no request may have.
        """
        met = self._by_salt.get(NO_SALT if salt is None else salt_digest(salt), {}).values()
        return sorted(met, key=lambda each: -each.donors)[:_MAX_MET]


@functools.lru_cache(maxsize=1024)
def _key_and_salt(spelling: bytes) -> tuple[str, str]:
    """Key and salt of a namespace in MessagePack. Donors that state it in the same words and order share one entry."""
    namespace = CacheNamespace.from_dict(msgspec.msgpack.decode(spelling))
    salt, unsalted = str(namespace.extra.get("cache_salt", NO_SALT)), tenant_key(None)
    expected = unsalted if salt in (NO_SALT, salt_digest("")) else TENANT_PREFIX + salt.removeprefix(SALT_PREFIX)
    if namespace.extra.get("tenant_key", expected) != expected:
        raise NamespaceError("the namespace's tenant key is not that of its salt; use CacheNamespace.for_request()")
    return namespace.key, salt


# No cycle goes through a donor, and the garbage collector would look at a hundred thousand of them.
class FollowedDonor(msgspec.Struct, gc=False):
    """A donor as it was announced, its `donor_digest`, and its posting in the index of its namespace, if it has one."""

    tier: str
    tokens: int
    tenant_key: str
    digest: int
    namespace: KnownNamespace | None = None
    posting: Posting | None = None


@dataclass(slots=True, eq=False)
class FollowedWorker:
    """A worker: its number in the indexes, its last event, its donors by id and the XOR of their `donor_digest`.

    `is_synced`: no event was missed since its last reset. `is_partial`: donors were left out for lack of room, so
    heartbeats are compared only when there is room again. `is_unplaced`: donors were left out because there were too
    many namespaces. `unheeded` counts heartbeats not accepted since the last accepted event,
    `events` accepted events by kind, and `compared` heartbeats compared with the known donors.
    """

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
    is_partial: bool = False
    is_unplaced: bool = False
    unheeded: int = 0
    events: Counter[str] = field(default_factory=Counter)
    compared: int = 0


class FairLock:
    """A lock for a `with` statement, which a thread that waits gets before one that asks again at once.

    `threading.Lock` goes to a thread that runs, so a thread that takes it in a loop would keep waiting ones out. Here
    the thread that waits holds the turn meanwhile, so that no other thread can ask.
    """

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Verdict(str, Enum):
    """How an event relates to the events before it. `is_to_apply`: it is new, and to be applied."""

    RESET = "reset"  # forget the worker's donors; all of them are registered again
    NEXT = "next"  # the next event, and none was missed since the reset: apply it
    UNSYNCED = "unsynced"  # the next event, but one was missed earlier: apply it
    GAP = "gap"  # events just before it were missed: apply it and ask for a resync
    DUPLICATE = "duplicate"  # seen already, or too late: ignore it
    STALE = "stale"  # of an earlier generation: ignore it
    REFUSED = "refused"  # of a worker that is not followed, or not plausible: ignore it

    def __init__(self, value: str) -> None:
        self.is_to_apply = value in ("reset", "next", "unsynced", "gap")


_MEANING = {
    "gap": "events before it are missing",
    "duplicate": "was seen already, or comes too late",
    "stale": "is of an earlier generation; two processes may have this worker id",
}


class Directory:
    """Takes messages with `observe` and answers with `holders`. Thread safe; only `holders` raises.

    `clock` (seconds, monotonic) times expiry and requests for a resync. Where `accepted` is given, only these workers
    are followed. `counts` counts messages by verdict and problem; `on_problem` gets the name of each problem and a
    sentence.
    """

    def __init__(
        self,
        *,
        accepted: Collection[Worker] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_problem: Callable[[str, str], None] = lambda _reason, _sentence: None,
    ) -> None:
        self._accepted = None if accepted is None else frozenset(accepted)
        self._clock, self._on_problem = clock, on_problem
        self._lock = FairLock()
        self._workers: dict[Worker, FollowedWorker] = {}
        self._by_number: list[Worker | None] = []
        self._free_numbers: list[int] = []
        # Former numbers of workers, and the donors that are still in the indexes under them.
        self._cleared: deque[tuple[int, list[FollowedDonor]]] = deque()
        self._namespaces = KnownNamespaces()
        self._donors = self._entries = 0
        self._expire_at = float("-inf")
        self.counts: Counter[str] = Counter()
        warm_up()

    def observe(self, payload: bytes, sender: str | None = None) -> Verdict | None:
        """Takes one message and returns its verdict; None when it is not an event.

        Where `sender` is given, events of other workers are refused.
        """
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
                return Verdict.REFUSED
            now = self._clock()
            self._expire(now)
            is_known = worker in self._workers
            verdict = self._judged(event, worker)
            if not verdict.is_to_apply and self._is_given_up(event, worker):
                verdict = self._judged(event, worker)
            if is_known and verdict in _MEANING:
                self._problem(verdict.value, _MEANING[verdict], event)
            else:
                self.counts[verdict.value] += 1
            if verdict.is_to_apply:
                self._take(event, worker, verdict, now)
            if self._cleared:
                self._tidy()
        return verdict

    def holders(self, token_ids: npt.ArrayLike, *, tenant_salt: str | None = None) -> tuple[Holder, ...]:
        """The workers that hold text of a prompt (integers [n]), the largest share first.

        A worker's `tokens` are estimated over all its donors of one namespace: text that two of them hold counts once.
        Only donors with the same `tenant_salt` (raw; None is no salt) are searched. Raises ValueError for bad tokens,
        NamespaceError for a bad salt.
        """
        prompts = self._fingerprints(token_ids, tenant_salt)
        return self._holders_of(prompts) if prompts else ()

    def workers(self) -> dict[Worker, FollowedWorker]:
        """The workers that are followed, by id and rank. For reading only; they go on changing."""
        with self._lock:
            self._expire(self._clock())
            return dict(sorted(self._workers.items()))

    def donors_of(self, worker: Worker) -> dict[str, str]:
        """Tier by donor id of the known donors; empty for a worker that is not followed."""
        with self._lock:
            followed = self._workers.get(worker)
            return {} if followed is None else {name: donor.tier for name, donor in followed.donors.items()}

    def resyncs_due(self) -> tuple[Worker, ...]:
        """The workers to ask for a resync now; each is returned once per RESYNC_SECONDS at most, or once per
        heartbeat interval where that is shorter."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            due = []
            for worker, followed in self._workers.items():
                is_needed = followed.wants_resync or not followed.is_synced
                if is_needed and now - followed.asked_at >= min(RESYNC_SECONDS, followed.interval):
                    followed.asked_at, followed.wants_resync = now, False
                    due.append(worker)
            return tuple(due)

    # Apart, so that a benchmark can time each.

    def _fingerprints(
        self, token_ids: npt.ArrayLike, salt: str | None
    ) -> list[tuple[KnownNamespace, PromptFingerprints]]:
        with self._lock:
            self._expire(self._clock())
            met = self._namespaces.met_by(salt)
        prompts = fingerprints_of(token_ids, [sketch_key(each.key, salt) for each in met]) if met else []
        return list(zip(met, prompts, strict=True))

    def _holders_of(self, prompts: list[tuple[KnownNamespace, PromptFingerprints]]) -> tuple[Holder, ...]:
        with self._lock:
            workers = list(self._by_number)
            shares = np.zeros(len(workers))
            for namespace, prompt in prompts:
                np.maximum(shares, namespace.index.search(len(shares), prompt), out=shares)
        tokens = np.rint(shares * prompts[0][1].tokens).astype(int).tolist()
        held = [Holder(who, count) for who, count in zip(workers, tokens, strict=True) if count and who is not None]
        return tuple(sorted(held, key=lambda holder: (-holder.tokens, holder.worker)))

    # -- all below with the lock held ------------------------------------------------------------------------------

    def _problem(self, reason: str, sentence: str, event: Event | None = None) -> None:
        self.counts[reason] += 1
        who = "" if event is None else f"worker {event.worker_id}.{event.dp_rank}, event {event.event_id}: "
        self._on_problem(reason, who + sentence)

    def _judged(self, event: Event, worker: Worker) -> Verdict:
        followed, is_reset = self._workers.get(worker), isinstance(event.data, ProviderGenerationReset)
        if self._accepted is not None and worker not in self._accepted:
            self._problem("unknown_worker", "is of a worker that is not followed", event)
            return Verdict.REFUSED
        if followed is None:
            if len(self._workers) < MAX_WORKERS:
                return Verdict.RESET if is_reset else Verdict.GAP
            self._problem("too_many_workers", f"{MAX_WORKERS} workers are followed, which is the most", event)
            return Verdict.REFUSED
        # An event of unknown kind may name no generation.
        generation = followed.generation if event.generation is None else event.generation
        if generation < followed.generation:
            return Verdict.STALE
        if generation > followed.generation:
            if generation > time.time() * 1e6 + MOST_AHEAD_US:
                self._problem("future_generation", f"generation {generation} begins more than a day from now", event)
                return Verdict.REFUSED
            if is_reset:
                return Verdict.RESET
            # A restarted worker whose reset was missed sends another one when asked.
            followed.wants_resync = True
            self._problem("unproven_generation", f"generation {generation} began with no reset", event)
            return Verdict.REFUSED
        if event.event_id <= followed.last_id:
            return Verdict.DUPLICATE
        if is_reset:
            return Verdict.RESET
        if event.event_id > followed.last_id + 1:
            return Verdict.GAP
        return Verdict.NEXT if followed.is_synced else Verdict.UNSYNCED

    def _is_given_up(self, event: Event, worker: Worker) -> bool:
        """Counts a heartbeat that was not accepted; True when there were so many that the worker is forgotten.

        So a live worker's own heartbeats undo what another process said in its name.
        """
        followed = self._workers.get(worker)
        if followed is None or not isinstance(event.data, ProviderHeartbeat):
            return False
        followed.unheeded += 1
        if followed.unheeded < HEARTBEATS_MISSED:
            return False
        self._forget(worker)
        return True

    def _take(self, event: Event, worker: Worker, verdict: Verdict, now: float) -> None:
        data = event.data
        followed = self._workers.get(worker)
        if followed is None:
            followed = self._workers[worker] = FollowedWorker(self._number_for(worker))
        if event.generation is not None:
            followed.generation = event.generation
        followed.last_id, followed.is_synced = event.event_id, verdict in (Verdict.RESET, Verdict.NEXT)
        followed.seen_at, followed.unheeded = now, 0
        followed.events["unknown" if isinstance(event, UnknownEvent) else event.data.kind] += 1
        if isinstance(data, DonorRegistered):
            self._register(event, followed, data)
        elif isinstance(data, (DonorEvicted, DonorRelocated)):
            self._change(event, followed, data)
        elif isinstance(data, (ProviderGenerationReset, DonorsPurged)):
            self._clear(worker, followed)
            if verdict is Verdict.RESET:
                followed.is_partial = followed.is_unplaced = False
        elif isinstance(data, ProviderHeartbeat):
            self._compare(event, followed, data)
        else:
            self.counts["unknown_kind"] += 1

    def _register(self, event: Event, followed: FollowedWorker, data: DonorRegistered) -> None:
        self._drop(followed, data.donor_id)
        if self._donors >= MAX_DONORS:
            self._problem("too_many_donors", f"{MAX_DONORS} donors are known, which is the most", event)
            followed.is_partial = True
            return
        tier = data.location.tier
        donor = FollowedDonor(tier, data.token_count, data.tenant_key, donor_digest(data.donor_id, tier))
        followed.donors[data.donor_id] = donor
        followed.digest ^= donor.digest
        self._donors += 1
        try:
            sketch = Sketch.from_bytes(data.segments[0].provider_metadata)  # of the whole donor
            donor.namespace = self._namespaces.enter(data.namespace)
        except (NamespaceError, RecursionError) as error:
            self._problem("bad_namespace", str(error), event)
            followed.is_unplaced |= self._namespaces.is_full
        except ValueError as error:
            self._problem("no_sketch", str(error), event)
        else:
            if self._entries + len(sketch.entries) > DEFAULT_ENTRIES * MAX_DONORS:
                self._problem("index_full", "the index has no room for its sketch", event)
            else:
                donor.posting = donor.namespace.index.add(followed.number, sketch)
                self._entries += len(donor.posting.entries)

    def _change(self, event: Event, followed: FollowedWorker, data: DonorEvicted | DonorRelocated) -> None:
        donor = followed.donors.get(data.donor_id)
        if donor is None:
            if followed.is_synced and not followed.is_partial:
                self._problem("unknown_donor", "names a donor that was never registered", event)
        elif isinstance(data, DonorRelocated):
            followed.digest ^= donor.digest
            donor.tier = data.new_location.tier
            donor.digest = donor_digest(data.donor_id, donor.tier)
            followed.digest ^= donor.digest
        elif data.segments is None:
            self._drop(followed, data.donor_id)
        else:  # which part is left cannot be read from the sketch
            self._take_back(donor)

    def _compare(self, event: Event, followed: FollowedWorker, heartbeat: ProviderHeartbeat) -> None:
        followed.interval = min(max(heartbeat.interval_seconds, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        if not followed.is_synced:
            return
        followed.compared += 1
        lacking, room = heartbeat.donor_count - len(followed.donors), MAX_DONORS - self._donors
        is_comparable = not followed.is_partial or lacking <= room
        is_known = (lacking, heartbeat.state_digest) == (0, followed.digest)
        is_placed = not followed.is_unplaced or self._namespaces.is_full
        if (is_comparable and not is_known) or not is_placed:
            followed.is_synced = False
            sentence = f"reports {heartbeat.donor_count} donors where its events leave {len(followed.donors)}"
            self._problem("wrong_state", sentence, event)

    def _drop(self, followed: FollowedWorker, donor_id: str) -> None:
        donor = followed.donors.pop(donor_id, None)
        if donor is not None:
            self._take_back(donor)
            followed.digest ^= donor.digest
            self._donors -= 1

    def _take_back(self, donor: FollowedDonor) -> None:
        """Removes a donor from the index and from its namespace."""
        self._leave_index(donor)
        if donor.namespace is not None:
            self._namespaces.leave(donor.namespace)
            donor.namespace = None

    def _leave_index(self, donor: FollowedDonor) -> None:
        if donor.posting is not None and donor.namespace is not None:
            self._entries -= len(donor.posting.entries)
            if donor.namespace.donors:
                donor.namespace.index.remove(donor.posting)
            donor.posting = None

    def _clear(self, worker: Worker, followed: FollowedWorker) -> None:
        """Removes all donors of a worker at once: it gets another number, and `_tidy` clears the index step by step."""
        for donor in followed.donors.values():
            if donor.namespace is not None:
                self._namespaces.leave(donor.namespace)
        if followed.donors:
            self._by_number[followed.number] = None
            self._cleared.append((followed.number, list(followed.donors.values())))
            followed.number = self._number_for(worker)
        self._donors -= len(followed.donors)
        followed.donors, followed.digest = {}, 0

    def _tidy(self) -> None:
        """Does a small part of the work that `_clear` postponed."""
        for _ in range(_REMOVED_AT_ONCE):
            number, donors = self._cleared[0]
            if not donors:
                self._cleared.popleft()
                self._free_numbers.append(number)
                return
            self._leave_index(donors.pop())

    def _number_for(self, worker: Worker) -> int:
        if not self._free_numbers:
            self._free_numbers.append(len(self._by_number))
            self._by_number.append(None)
        number = self._free_numbers.pop()
        self._by_number[number] = worker
        return number

    def _expire(self, now: float) -> None:
        """Forgets silent workers; checks every _LOOK_SECONDS."""
        if now < self._expire_at:
            return
        self._expire_at = now + _LOOK_SECONDS
        for worker, followed in list(self._workers.items()):
            if now - followed.seen_at > HEARTBEATS_MISSED * followed.interval:
                self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        followed = self._workers.pop(worker)
        self._clear(worker, followed)
        self._by_number[followed.number] = None
        self._free_numbers.append(followed.number)
        self.counts["expired"] += 1
