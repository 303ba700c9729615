"""FleetObserver: a reader that keeps who holds what and writes down whatever is wrong on the subject."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from semblend_trt.fleet.continuity import Continuity, Stream, Verdict
from semblend_trt.fleet.events import (
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorsPurged,
    EventError,
    ProviderGenerationReset,
    ProviderHeartbeat,
    SemanticKvEvent,
    UnknownEvent,
)
from semblend_trt.fleet.wire import decode, state_digest

MAX_PROBLEMS = 1000
MAX_DONORS = 1_000_000


@dataclass(frozen=True, slots=True)
class KnownDonor:
    """A donor as it was announced: its tier, its tokens, and whose it is."""

    tier: str
    tokens: int
    tenant_key: str


@dataclass(slots=True)
class WorkerView:
    """What one (worker, rank) said."""

    donors: dict[str, KnownDonor] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    generation: int | None = None
    checked_heartbeats: int = 0


class FleetObserver:
    """Feed it messages with `observe`. `problems` are sentences, the last MAX_PROBLEMS; `problem_counts` counts all."""

    def __init__(self) -> None:
        self.workers: dict[Stream, WorkerView] = {}
        self.problems: deque[str] = deque(maxlen=MAX_PROBLEMS)
        self.problem_counts: Counter[str] = Counter()
        self.messages = self.bytes = 0
        self._continuity = Continuity()
        self._donors = 0

    def observe(self, payload: bytes, sender: str | None = None) -> SemanticKvEvent | None:
        """Reads one message; None for one that is no event. `sender` is the worker id that its subject names, None
        where none does; an event of another worker is a problem, and nothing of it is believed. Raises nothing.
        """
        self.messages += 1
        self.bytes += len(payload)
        try:
            event = decode(payload)
        except EventError as error:
            self._problem(error.reason, str(error))
            return None
        stream = (event.worker_id, event.dp_rank)
        name = f"worker {event.worker_id}.{event.dp_rank}, event {event.event_id}"
        if sender is not None and str(event.worker_id) != sender:
            self._problem("wrong_subject", f"{name}: came on the subject of worker {sender}")
            return event
        was_followed = self._continuity.generation(stream) is not None
        verdict = self._continuity.observe(event)
        if verdict is Verdict.REFUSED:
            self._problem("refused", f"{name}: more workers than are followed")
            return event
        view = self.workers.setdefault(stream, WorkerView())
        view.events[event.data.kind if not isinstance(event.data, UnknownEvent) else "unknown"] += 1
        if verdict in (Verdict.DUPLICATE, Verdict.STALE) or (verdict is Verdict.GAP and was_followed):
            self._problem(verdict.value, f"{name}: {_MEANING[verdict]}")
        if verdict.is_to_apply:
            view.generation = self._continuity.generation(stream)
            self._apply(view, event, name, self._continuity.is_synced(stream))
        return event

    def is_synced(self, stream: Stream) -> bool:
        """True when everything since the stream's reset was seen."""
        return self._continuity.is_synced(stream)

    def _apply(self, view: WorkerView, event: SemanticKvEvent, name: str, is_synced: bool) -> None:
        data, donors = event.data, view.donors
        before = len(donors)
        if isinstance(data, (ProviderGenerationReset, DonorsPurged)):
            donors.clear()
        elif isinstance(data, DonorRegistered):
            if self._donors < MAX_DONORS or data.donor_id in donors:
                donors[data.donor_id] = KnownDonor(data.location.tier, data.token_count, data.tenant_key)
            else:
                self._problem("too_many_donors", f"{name}: more than {MAX_DONORS} donors")
        elif isinstance(data, DonorEvicted):
            if data.segments is None and donors.pop(data.donor_id, None) is None and is_synced:
                self._problem("unknown_donor", f"{name}: evicts a donor that was never registered")
        elif isinstance(data, DonorRelocated):
            known = donors.get(data.donor_id)
            if known is not None:
                donors[data.donor_id] = KnownDonor(data.new_location.tier, known.tokens, known.tenant_key)
            elif is_synced:
                self._problem("unknown_donor", f"{name}: relocates a donor that was never registered")
        elif isinstance(data, ProviderHeartbeat) and is_synced:
            self._check(view, data, name)
        self._donors += len(donors) - before

    def _check(self, view: WorkerView, heartbeat: ProviderHeartbeat, name: str) -> None:
        view.checked_heartbeats += 1
        known = state_digest((donor_id, donor.tier) for donor_id, donor in view.donors.items())
        if (heartbeat.donor_count, heartbeat.state_digest) != (len(view.donors), known):
            self._problem(
                "state", f"{name}: holds {heartbeat.donor_count} donors, and its events tell of {len(view.donors)}"
            )

    def _problem(self, reason: str, sentence: str) -> None:
        self.problem_counts[reason] += 1
        self.problems.append(f"{reason}: {sentence}")


_MEANING = {
    Verdict.GAP: "events before it are missing",
    Verdict.DUPLICATE: "was seen, or comes too late",
    Verdict.STALE: "is of an earlier generation; two processes may have this worker id",
}
