"""FleetStatus: who is known of the fleet, and what is wrong with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semblend_trt.fleet.directory import worker_name
from semblend_trt.namespace import PARALLEL_RANKS, REVISION_OF, is_content, is_unknown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from semblend_trt.fleet.directory import Directory
    from semblend_trt.namespace import CacheNamespace

# Two live processes have the worker's id; no event came for longer than its heartbeats say; events are missing.
LIVE_PROBLEMS = ("id_twice", "old_events", "unsynced")
# Heartbeat intervals after which a worker's events are old.
_OLD = 1.5
# Fields that may differ between requests of one engine.
_OF_REQUESTS = ("extra.cache_salt", "extra.tenant_key", "adapter")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the directory knows it: its donors' `tokens` by tier, the number of their tenants, its events by kind
    and the age of its last one."""

    name: str
    generation: int
    donors: int
    tokens: dict[str, int]
    tenants: int
    events: dict[str, int]
    heartbeats_compared: int
    silent_seconds: float


@dataclass(slots=True)
class FleetStatus:
    """The known workers, and by problem a sentence for each worker that has it."""

    workers: list[WorkerStatus]
    problems: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Directory) -> FleetStatus:
        """Return the status of the workers that a directory follows."""
        status, found = cls([]), defaultdict[str, list[str]](list)
        twice, now = directory.twice(), directory.now()
        for worker, followed in directory.workers().items():
            name, silent, tokens = worker_name(worker), now - followed.seen_at, Counter[str]()
            donors = list(followed.donors.values())
            for donor in donors:
                tokens[donor.tier] += donor.tokens
            tenants = len({donor.namespace.salt for donor in donors if donor.namespace is not None})
            heard = dict(followed.events), followed.compared, round(silent, 3)
            known = WorkerStatus(name, followed.generation, len(donors), dict(tokens), tenants, *heard)
            status.workers.append(known)
            if worker in twice:
                found["id_twice"].append(f"two live processes say that they are worker {name}; give each its own id")
            if silent > _OLD * followed.interval:
                sentence = f"worker {name} has said nothing for {silent:.1f} s, and promised a heartbeat each"
                found["old_events"].append(f"{sentence} {followed.interval:g} s")
            if not followed.is_synced:
                found["unsynced"].append(f"events of worker {name} are missing, and it has not sent them again")
        status.problems = dict(found)
        return status


def fields_apart(namespaces: Mapping[str, Collection[CacheNamespace]]) -> list[str]:
    """Return a sentence for each field that keeps the donors of these workers apart, by name, whatever salts and
    adapters requests have."""
    workers_by_value: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker, of_worker in namespaces.items():
        for namespace in of_worker:
            for name, value in _flat(namespace).items():
                shown = "not determined" if is_unknown(value) else repr(value)
                workers_by_value[name][shown].add(worker)
    sentences = []
    for name, by_value in sorted(workers_by_value.items()):
        if len(by_value) > 1 or (len(namespaces) > 1 and "not determined" in by_value):
            parts = (f"{value[:80]} on {', '.join(sorted(names))}" for value, names in sorted(by_value.items()))
            sentences.append(f"namespaces do not meet in {name}: {'; '.join(parts)}")
    return sentences


def _flat(namespace: CacheNamespace) -> dict[str, Any]:
    """Return the fields that decide reuse between workers, nested ones by a name with a dot."""
    values = namespace.to_dict()
    for name, revision in REVISION_OF.items():
        if is_content(values[revision]):
            del values[name]
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name}.{key}".rstrip("."): each for key, each in nested.items() if key not in PARALLEL_RANKS}
    return {name: value for name, value in flat.items() if name not in _OF_REQUESTS}
