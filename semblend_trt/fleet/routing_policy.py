"""Routing policies: which replica a request is sent to. `POLICIES` names them.

Load and reuse have one unit, tokens of prefill: `Replica.load` is what a replica still has to compute, and a prompt
costs a replica the tokens that it does not hold.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from semblend_trt.fleet.directory import Holder, Worker


MAX_SESSIONS = 65536
BLOCK_TOKENS = 32
MAX_BLOCKS = 262_144
MAX_WORKERS = 1024


class NoReplicaError(SemBlendError):
    """No replica can take a request."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker that requests can be sent to. `load`: the tokens of prefill that it was sent and has not answered."""

    worker: Worker
    load: float
    is_healthy: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRequest:
    """A request to place: its prompt (integers [n]) and who holds how much of it, as `Directory.holders` says.

    `tenant_salt` keeps what is remembered of one tenant's prompts apart from the others'.
    """

    token_ids: npt.ArrayLike
    session_id: str | None = None
    holders: tuple[Holder, ...] = ()
    tenant_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica that was chosen, and how many of the prompt's tokens it is expected to hold."""

    worker: Worker
    reused_tokens: int = 0


class RoutingPolicy(Protocol):
    """Chooses replicas. Thread safe."""

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        """The replica to send `request` to; it counts as sent. Raises NoReplicaError when none is healthy."""


class RoundRobin:
    """One replica after the other."""

    def __init__(self) -> None:
        self._turn = _Turn()

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        chosen = self._turn.best_of(_healthy(replicas), lambda _: 0.0)
        return Choice(chosen.worker, _held(request).get(chosen.worker, 0))


class LeastLoaded:
    """The replica with the least to compute; of equals the one that was not chosen for longest."""

    def __init__(self) -> None:
        self._turn = _Turn()

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        chosen = self._turn.best_of(_healthy(replicas), lambda replica: -replica.load)
        return Choice(chosen.worker, _held(request).get(chosen.worker, 0))


class ExactPrefix:
    """The replica that was sent the longest beginning of this prompt before; of equals the one with the least load.

    It knows what it chose itself, and nothing of what replicas have dropped since.
    """

    def __init__(self) -> None:
        self._turn = _Turn()
        self._sent = PrefixMemory()

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        healthy = _healthy(replicas)
        prefix = self._sent.prefix_of(request.token_ids, request.tenant_salt)
        known = self._sent.known(prefix, [replica.worker for replica in healthy])
        chosen = self._turn.best_of(healthy, lambda replica: (known[replica.worker], -replica.load))
        self._sent.note(prefix, chosen.worker)
        return Choice(chosen.worker, known[chosen.worker])


class SpanOverlap:
    """The replica that would begin to answer first: the least of its load and the tokens that it does not hold.

    A replica that holds r of a prompt's n tokens and has l tokens to compute is done with the prompt after
    l + n - r tokens of prefill. n is the same for all, so the largest r - `load_weight` x l wins. With a weight below
    one, requests stay with their text for longer while it has a queue. Of equals the session's last replica is taken.
    """

    def __init__(self, load_weight: float = 1.0, max_sessions: int = MAX_SESSIONS) -> None:
        """Raises ValueError for a weight that is not positive."""
        if not load_weight > 0:
            raise ValueError(f"a load weight of {load_weight}; it must be above 0")
        self._load_weight, self._max_sessions = load_weight, max_sessions
        self._turn = _Turn()
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str | None, str], Worker] = OrderedDict()

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        held, last = _held(request), self._last_of(request)

        def worth(replica: Replica) -> tuple[float, bool]:
            gain = held.get(replica.worker, 0) - self._load_weight * replica.load
            return gain, replica.worker == last

        chosen = self._turn.best_of(_healthy(replicas), worth)
        self._note(request, chosen.worker)
        return Choice(chosen.worker, held.get(chosen.worker, 0))

    def _last_of(self, request: RoutingRequest) -> Worker | None:
        if request.session_id is None:
            return None
        with self._lock:
            return self._sessions.get((request.tenant_salt, request.session_id))

    def _note(self, request: RoutingRequest, worker: Worker) -> None:
        if request.session_id is not None:
            session = (request.tenant_salt, request.session_id)
            with self._lock:
                self._sessions[session] = worker
                self._sessions.move_to_end(session)
                if len(self._sessions) > self._max_sessions:
                    self._sessions.popitem(last=False)


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "exact_prefix": ExactPrefix,
    "span_overlap": SpanOverlap,
}


class _Turn:
    """Whose turn it is among replicas that are worth the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen_at: dict[Worker, int] = {}
        self._choices = 0

    def best_of(self, replicas: Sequence[Replica], worth: Callable[[Replica], float | tuple[float, float]]) -> Replica:
        """The replica with the largest `worth`; of equals the one that was not chosen for longest."""
        with self._lock:
            best = max(replicas, key=lambda each: (worth(each), -self._chosen_at.get(each.worker, 0)))
            self._choices += 1
            self._chosen_at[best.worker] = self._choices
        return best


def _healthy(replicas: Sequence[Replica]) -> list[Replica]:
    healthy = [replica for replica in replicas if replica.is_healthy]
    if not healthy:
        raise NoReplicaError(f"none of {len(replicas)} replicas is healthy")
    return healthy


def _held(request: RoutingRequest) -> dict[Worker, int]:
    return {holder.worker: holder.tokens for holder in request.holders}


class PrefixMemory:
    """Remembers the last MAX_BLOCKS blocks of BLOCK_TOKENS tokens of each worker. Thread safe.

    A block is known by a 64-bit hash of everything up to its end, under the interpreter's key of this process.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._workers: OrderedDict[Worker, OrderedDict[int, None]] = OrderedDict()

    def prefix_of(self, token_ids: npt.ArrayLike, tenant_salt: str | None) -> list[int]:
        """The hashes of a prompt's whole blocks (integers [n]), each of all before it, the first of the salt too."""
        data = np.ascontiguousarray(token_ids, dtype=np.int64).tobytes()
        size = 8 * BLOCK_TOKENS
        before, hashes = hash((tenant_salt, "")), []
        for start in range(0, len(data) - size + 1, size):
            before = hash((before, data[start : start + size]))
            hashes.append(before)
        return hashes

    def known(self, prefix: list[int], workers: Iterable[Worker]) -> dict[Worker, int]:
        """How many tokens of `prefix`, from its beginning on, each of `workers` was sent."""
        with self._lock:
            return {worker: BLOCK_TOKENS * self._blocks_known(prefix, worker) for worker in workers}

    def note(self, prefix: list[int], worker: Worker) -> None:
        """Remembers that `worker` was sent `prefix`."""
        with self._lock:
            sent = self._workers.setdefault(worker, OrderedDict())
            self._workers.move_to_end(worker)
            if len(self._workers) > MAX_WORKERS:
                self._workers.popitem(last=False)
            # The beginning is noted last, so that it is forgotten last: without it the rest is of no use.
            for block in reversed(prefix[: self._max_blocks]):
                sent[block] = None
                sent.move_to_end(block)
            while len(sent) > self._max_blocks:
                sent.popitem(last=False)

    def _blocks_known(self, prefix: list[int], worker: Worker) -> int:
        sent = self._workers.get(worker)
        if sent is None:
            return 0
        return next((at for at, block in enumerate(prefix) if block not in sent), len(prefix))
