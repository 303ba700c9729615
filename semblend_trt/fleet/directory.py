"""Directory: which worker of the fleet holds how much of a prompt, as the workers' events tell.

Whatever comes in is checked, bounded and counted; a wrong or forged event can misplace requests for a while and
nothing else. Only this reader's own clocks are used: a worker is gone when nothing that follows was heard of it for
some of its heartbeats, or when as many heartbeats in its name were not believed. Then any generation is, so that
whatever was forged blinds a reader for those heartbeats and no longer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.continuity import Continuity, Verdict
from semblend_trt.fleet.events import (
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorsPurged,
    EventError,
    ProviderGenerationReset,
    ProviderHeartbeat,
    UnknownEvent,
)
from semblend_trt.fleet.followed_worker import FollowedDonor, FollowedWorker
from semblend_trt.fleet.holder import Holder, Worker, WorkerState
from semblend_trt.fleet.known_namespaces import KnownNamespaces
from semblend_trt.fleet.sketch import DEFAULT_ENTRIES, Sketch, fingerprints_of, sketch_key
from semblend_trt.fleet.sketch_index import SketchIndex
from semblend_trt.fleet.wire import decode, donor_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from semblend_trt.fleet.events import SemanticKvEvent
    from semblend_trt.fleet.sketch import PromptFingerprints

    _Prompts = list[tuple[int, PromptFingerprints]]

MAX_WORKERS = 1024
MAX_DONORS = 131_072
# Heartbeats missed, or not believed, after which a worker is gone; bounds of what it may say that their interval is.
HEARTBEATS_MISSED = 3
SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.1, 60.0
# A generation is a time in microseconds. One that lies further ahead of this reader's own time replaces no other.
MOST_AHEAD_US = 86_400_000_000
# How often silent workers are looked for, in seconds.
_LOOK_SECONDS = 0.05


class Directory:
    """Feed it messages with `observe`, or events with `apply`; ask it with `holders`. Thread safe; raises nothing
    but what `holders` says.

    `clock` (seconds, monotonic) times expiry and requests for a resync, `wall_clock` (seconds since 1970) bounds
    generations. Only workers in `accepted` are followed, where it is given. `counts` tells what became of messages.
    """

    def __init__(
        self,
        *,
        accepted: Collection[Worker] | None = None,
        max_workers: int = MAX_WORKERS,
        max_donors: int = MAX_DONORS,
        resync_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._accepted = None if accepted is None else frozenset(accepted)
        self._max_donors, self._resync_seconds = max_donors, resync_seconds
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.Lock()
        self._continuity = Continuity(max_workers)
        self._workers: dict[Worker, FollowedWorker] = {}
        self._by_number: list[Worker | None] = []
        self._namespaces = KnownNamespaces()
        self._index = SketchIndex(DEFAULT_ENTRIES * max_donors)
        self._donors = 0
        self._expire_at = float("-inf")
        self.counts: Counter[str] = Counter()

    def observe(self, payload: bytes, sender: str | None = None) -> Verdict | None:
        """Takes one message; None for one that is no event. An event of another worker than `sender` is refused, where
        it is given."""
        try:
            event = decode(payload)
        except EventError as error:
            with self._lock:
                self.counts[error.reason] += 1
            return None
        if sender is not None and str(event.worker_id) != sender:
            with self._lock:
                self.counts["wrong_subject"] += 1
            return Verdict.REFUSED
        return self.apply(event)

    def apply(self, event: SemanticKvEvent) -> Verdict:
        """Takes one event and says what it was to this reader."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            verdict = self._judged(event)
            if not verdict.is_to_apply and self._is_given_up(event):
                verdict = self._judged(event)
            self.counts[verdict.value] += 1
            if verdict.is_to_apply:
                self._take(event, verdict, now)
            self._index.tidy()
        return verdict

    def holders(
        self, token_ids: npt.ArrayLike, *, tenant_salt: str | None = None, model: str | None = None
    ) -> tuple[Holder, ...]:
        """The workers that hold text of a prompt (integers [n]), the largest share first.

        A worker's `tokens` are estimated over all its donors of one namespace together: what two of them hold counts
        once. Only donors of requests with the same `tenant_salt` (raw; None is no salt) are looked at, and where
        `model` is given only those whose namespace names it. Raises ValueError for bad tokens, NamespaceError for a
        bad salt.
        """
        prompts = self._fingerprints(token_ids, tenant_salt, model)
        return self._holders_of(prompts) if prompts else ()

    def workers(self) -> tuple[WorkerState, ...]:
        """The workers that are followed, by id."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            return tuple(
                WorkerState(
                    worker, self._continuity.is_synced(worker), len(followed.donors), max(0.0, now - followed.seen_at)
                )
                for worker, followed in sorted(self._workers.items())
            )

    def donors_of(self, worker: Worker) -> dict[str, str]:
        """Tier by donor id, as far as is known; empty for a worker that is not followed."""
        with self._lock:
            followed = self._workers.get(worker)
            return {} if followed is None else {name: donor.tier for name, donor in followed.donors.items()}

    def resyncs_due(self) -> tuple[Worker, ...]:
        """The workers that have to be asked for a resync now; each is named once in `resync_seconds` at most, or in a
        heartbeat where those come more often."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            due = []
            for worker, followed in self._workers.items():
                is_needed = followed.wants_resync or not self._continuity.is_synced(worker)
                if is_needed and now - followed.asked_at >= min(self._resync_seconds, followed.interval):
                    followed.asked_at, followed.wants_resync = now, False
                    due.append(worker)
            return tuple(due)

    def _fingerprints(self, token_ids: npt.ArrayLike, salt: str | None, model: str | None) -> _Prompts:
        """The prompt's fingerprints in each namespace that it may meet, by the namespace's number."""
        with self._lock:
            self._expire(self._clock())
            met = self._namespaces.met_by(salt, model)
        prompts = fingerprints_of(token_ids, [sketch_key(each.key, salt) for each in met]) if met else []
        return [(each.number, prompt) for each, prompt in zip(met, prompts, strict=True)]

    def _holders_of(self, prompts: _Prompts) -> tuple[Holder, ...]:
        with self._lock:
            shares = np.zeros(len(self._by_number))
            for number, prompt in prompts:
                np.maximum(shares, self._index.search(number, len(shares), prompt), out=shares)
            tokens = np.rint(shares * prompts[0][1].tokens).astype(int).tolist()
            held = [
                Holder(worker, count)
                for worker, count in zip(self._by_number, tokens, strict=True)
                if count and worker is not None
            ]
        return tuple(sorted(held, key=lambda holder: (-holder.tokens, holder.worker)))

    # -- all below with the lock held ------------------------------------------------------------------------------

    def _judged(self, event: SemanticKvEvent) -> Verdict:
        worker = (event.worker_id, event.dp_rank)
        if self._accepted is not None and worker not in self._accepted:
            self.counts["unknown_worker"] += 1
            return Verdict.REFUSED
        generation, known = event.generation, self._continuity.generation(worker)
        if generation is not None and known is not None and generation > known:
            if generation > self._wall_clock() * 1e6 + MOST_AHEAD_US:
                self.counts["future_generation"] += 1
                return Verdict.REFUSED
            if not isinstance(event.data, ProviderGenerationReset):
                # A restarted worker, whose reset was missed, answers with one; whoever forged this does not have to.
                self._workers[worker].wants_resync = True
                self.counts["unproven_generation"] += 1
                return Verdict.REFUSED
        return self._continuity.observe(event)

    def _is_given_up(self, event: SemanticKvEvent) -> bool:
        """Counts a heartbeat that is not believed; True when there were so many that what was believed is forgotten.

        A live worker's own heartbeats end in this way what somebody else said in its name, whatever that was.
        """
        worker = (event.worker_id, event.dp_rank)
        followed = self._workers.get(worker)
        if followed is None or not isinstance(event.data, ProviderHeartbeat):
            return False
        followed.unheeded += 1
        if followed.unheeded < HEARTBEATS_MISSED:
            return False
        self._forget(worker)
        return True

    def _take(self, event: SemanticKvEvent, verdict: Verdict, now: float) -> None:
        worker, data = (event.worker_id, event.dp_rank), event.data
        followed = self._workers.get(worker)
        if followed is None:
            followed = self._workers[worker] = FollowedWorker(self._number_for(worker), now)
        followed.seen_at, followed.unheeded = now, 0
        if isinstance(data, (ProviderGenerationReset, DonorsPurged)):
            self._clear(followed)
            if verdict is Verdict.RESET:
                followed.is_partial = followed.is_unplaced = False
        elif isinstance(data, DonorRegistered):
            self._register(followed, data)
        elif isinstance(data, DonorEvicted):
            self._evict(followed, data)
        elif isinstance(data, DonorRelocated):
            self._relocate(followed, data)
        elif isinstance(data, ProviderHeartbeat):
            self._check(worker, followed, data)
        elif isinstance(data, UnknownEvent):
            self.counts["unknown_kind"] += 1

    def _register(self, followed: FollowedWorker, data: DonorRegistered) -> None:
        self._drop(followed, data.donor_id)
        if self._donors >= self._max_donors:
            self.counts["too_many_donors"] += 1
            followed.is_partial = True
            return
        donor = followed.donors[data.donor_id] = FollowedDonor(data.location.tier)
        followed.digest ^= donor_digest(data.donor_id, donor.tier)
        self._donors += 1
        try:
            sketch = Sketch.from_bytes(data.segments[0].provider_metadata)  # it tells of the whole donor
            donor.namespace = self._namespaces.enter(data.namespace)
        except (NamespaceError, RecursionError):
            self.counts["bad_namespace"] += 1
            followed.is_unplaced |= self._namespaces.is_full
        except ValueError:
            self.counts["no_sketch"] += 1
        else:
            donor.posting = self._index.add(donor.namespace.number, followed.number, sketch)
            if donor.posting is None:
                self.counts["index_full"] += 1

    def _evict(self, followed: FollowedWorker, data: DonorEvicted) -> None:
        if data.segments is None:
            self._drop(followed, data.donor_id)
        elif data.donor_id in followed.donors:  # what is left of it cannot be told from what is gone
            self._take_back(followed.donors[data.donor_id])

    def _relocate(self, followed: FollowedWorker, data: DonorRelocated) -> None:
        donor = followed.donors.get(data.donor_id)
        if donor is not None:
            followed.digest ^= donor_digest(data.donor_id, donor.tier)
            donor.tier = data.new_location.tier
            followed.digest ^= donor_digest(data.donor_id, donor.tier)

    def _check(self, worker: Worker, followed: FollowedWorker, heartbeat: ProviderHeartbeat) -> None:
        followed.interval = min(max(heartbeat.interval_seconds, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        lacking, room = heartbeat.donor_count - len(followed.donors), self._max_donors - self._donors
        is_comparable = not followed.is_partial or lacking <= room
        is_known = (lacking, heartbeat.state_digest) == (0, followed.digest)
        is_placed = not followed.is_unplaced or self._namespaces.is_full
        if self._continuity.is_synced(worker) and ((is_comparable and not is_known) or not is_placed):
            self.counts["wrong_state"] += 1
            self._continuity.distrust(worker)

    def _drop(self, followed: FollowedWorker, donor_id: str) -> None:
        donor = followed.donors.pop(donor_id, None)
        if donor is not None:
            self._take_back(donor)
            followed.digest ^= donor_digest(donor_id, donor.tier)
            self._donors -= 1

    def _take_back(self, donor: FollowedDonor) -> None:
        if donor.posting is not None:
            self._index.remove(donor.posting)
        if donor.namespace is not None:
            self._namespaces.leave(donor.namespace)
        donor.posting = donor.namespace = None

    def _clear(self, followed: FollowedWorker) -> None:
        self._index.forget(followed.number)
        for donor in followed.donors.values():
            if donor.namespace is not None:
                self._namespaces.leave(donor.namespace)
        self._donors -= len(followed.donors)
        followed.donors, followed.digest = {}, 0

    def _number_for(self, worker: Worker) -> int:
        if None in self._by_number:
            number = self._by_number.index(None)
            self._by_number[number] = worker
            return number
        self._by_number.append(worker)
        return len(self._by_number) - 1

    def _expire(self, now: float) -> None:
        """Lets silent workers go, looking for them from time to time."""
        if now < self._expire_at:
            return
        self._expire_at = now + _LOOK_SECONDS
        for worker, followed in list(self._workers.items()):
            if now - followed.seen_at > HEARTBEATS_MISSED * followed.interval:
                self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        followed = self._workers.pop(worker)
        self._clear(followed)
        self._by_number[followed.number] = None
        self._continuity.forget(worker)
        self.counts["expired"] += 1
