"""Routing policies: which replica a request is sent to. `POLICIES` names them.

Load and reuse are both tokens of prefill. `Replica.load` is what a replica still has to compute, and a prompt costs it
the tokens that it does not hold."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from semblend_trt.fleet.directory import Holder, Worker

MAX_SESSIONS = 65536
BLOCK_TOKENS = 32
MAX_BLOCKS = 262_144


class NoReplicaError(SemBlendError):
    """No replica can take a request."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker that requests can be sent to. `load`: tokens of prefill sent to it and not answered yet."""

    worker: Worker
    load: float
    is_healthy: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRequest:
    """A request to place: its prompt (integers [n]), its `Directory.holders`, and the salt that keeps tenants apart."""

    token_ids: npt.ArrayLike
    session_id: str | None = None
    holders: tuple[Holder, ...] = ()
    tenant_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen replica, and how many of the prompt's tokens it is expected to hold."""

    worker: Worker
    reused_tokens: int = 0


class RoutingPolicy:
    """Chooses the healthy replica of greatest worth; of equals the one chosen longest ago. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen_at: dict[Worker, int] = {}
        self._choices = 0

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        """Return the replica to send `request` to; it counts as sent. Raise NoReplicaError when all are unhealthy."""
        raise NotImplementedError

    def _best(
        self, replicas: Sequence[Replica], held: dict[Worker, int], worth: Callable[[Replica, int], tuple[float, ...]]
    ) -> Choice:
        """Choose by `worth`, which gets a replica and the number of the prompt's tokens that it holds."""
        healthy = [replica for replica in replicas if replica.is_healthy]
        if not healthy:
            raise NoReplicaError(f"none of {len(replicas)} replicas is healthy")

        def rank(each: Replica) -> tuple[tuple[float, ...], int]:
            return worth(each, held.get(each.worker, 0)), -self._chosen_at.get(each.worker, 0)

        with self._lock:
            worker = max(healthy, key=rank).worker
            self._choices += 1
            self._chosen_at[worker] = self._choices
        return Choice(worker, held.get(worker, 0))


class RoundRobin(RoutingPolicy):
    """One replica after the other."""

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        return self._best(replicas, _held(request), lambda _, __: ())


class LeastLoaded(RoutingPolicy):
    """The replica with the least to compute."""

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        return self._best(replicas, _held(request), lambda replica, _: (-replica.load,))


class ExactPrefix(RoutingPolicy):
    """The replica that was sent the longest prefix of this prompt before; of equals the one with the least load.
    It remembers the last MAX_BLOCKS blocks of BLOCK_TOKENS tokens per worker, and cannot see evictions."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[Worker, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        # A block is known by Python's hash of the salt and of all tokens up to its end.
        data, size = np.ascontiguousarray(request.token_ids, dtype=np.int64).tobytes(), 8 * BLOCK_TOKENS
        before, prefix = hash((request.tenant_salt, "")), list[int]()
        for start in range(0, len(data) - size + 1, size):
            before = hash((before, data[start : start + size]))
            prefix.append(before)
        known = {}
        with self._lock:
            for worker in (each.worker for each in replicas):
                blocks = self._sent[worker]
                count = next((at for at, block in enumerate(prefix) if block not in blocks), len(prefix))
                known[worker] = BLOCK_TOKENS * count
        choice = self._best(replicas, known, lambda replica, held: (held, -replica.load))
        with self._lock:
            blocks = self._sent[choice.worker]
            # The first block is noted last and forgotten last: without it the others are of no use.
            for block in reversed(prefix[:MAX_BLOCKS]):
                blocks[block] = None
                blocks.move_to_end(block)
            while len(blocks) > MAX_BLOCKS:
                blocks.popitem(last=False)
        return choice


class SpanOverlap(RoutingPolicy):
    """The replica that would start to answer first, by its load and the tokens that it does not hold.

    A replica that holds r of a prompt's n tokens and has l tokens to compute has prefilled it after l + n - r tokens. n
    is the same for all, so the largest r - `load_weight` x l wins. A weight below one keeps requests longer with a
    replica that holds their text but has a queue. Of equals, the session's last replica is taken."""

    def __init__(self, load_weight: float = 1.0) -> None:
        """Raise ValueError for a weight that is not positive."""
        super().__init__()
        if not load_weight > 0:
            raise ValueError(f"a load weight of {load_weight}; it must be above 0")
        self._load_weight = load_weight
        self._sessions: OrderedDict[tuple[str | None, str], Worker] = OrderedDict()

    def choose(self, request: RoutingRequest, replicas: Sequence[Replica]) -> Choice:
        session = (request.tenant_salt, request.session_id or "")
        last, weight = self._sessions.get(session), self._load_weight
        choice = self._best(
            replicas,
            _held(request),
            lambda replica, held: (held - weight * replica.load, replica.worker == last),
        )
        if request.session_id is not None:
            with self._lock:
                self._sessions[session] = choice.worker
                self._sessions.move_to_end(session)
                if len(self._sessions) > MAX_SESSIONS:
                    self._sessions.popitem(last=False)
        return choice


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "exact_prefix": ExactPrefix,
    "span_overlap": SpanOverlap,
}


def _held(request: RoutingRequest) -> dict[Worker, int]:
    return {holder.worker: holder.tokens for holder in request.holders}
