"""Says who holds how much in the fleet, and what is wrong with it.

The server and the subject are those of the settings (SEMBLEND_NATS_URL and so on) unless they are given here. `status`
asks the workers for all their donors, to compare them with the heartbeats, listens for a while, and prints a report in
JSON. Listen for at least two heartbeats of each worker. It exits with 1 when something is wrong: two live processes
have one worker id, a worker's events are old or missing, the workers' namespaces do not meet, or a message is no event
or fits none before it; and with 2 when it cannot listen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

from semblend_trt.cli.events import add_listening, listen_to
from semblend_trt.namespace import PARALLEL_RANKS, REVISION_OF, is_content, is_unknown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Mapping

    from semblend_trt.namespace import CacheNamespace

SUMMARY = "say who holds how much in the fleet, and what is wrong with it"
EXAMPLES = 20
# Fields that may differ between requests of one engine.
_OF_REQUESTS = ("extra.cache_salt", "extra.tenant_key", "adapter")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_listening(actions.add_parser("status", help=SUMMARY, description=f"{SUMMARY.capitalize()}."), 30.0)


def run(arguments: argparse.Namespace) -> int:
    """Listen and print. Raises SemBlendError when it cannot listen."""
    from semblend_trt.fleet.directory import Directory, worker_name

    messages, faults, sentences = Counter[str](), Counter[str](), deque[str](maxlen=EXAMPLES)

    def note(reason: str, sentence: str) -> None:
        faults[reason] += 1
        sentences.append(f"{reason}: {sentence}")

    def take(payload: bytes, sender: str | None) -> None:
        messages.update(messages=1, bytes=len(payload))
        directory.observe(payload, sender)

    directory = Directory(on_problem=note)
    asyncio.run(listen_to(arguments, take, asks=True))
    workers, problems = directory.status()
    held = {worker_name(each): list(followed.donors.values()) for each, followed in directory.workers().items()}
    of_workers = {name: {each.namespace.fields for each in donors if each.namespace} for name, donors in held.items()}
    if apart := fields_apart(of_workers):
        problems["apart"] = apart
    report = {**messages, "workers": workers, "problems": problems, "faults": faults, "examples": [*sentences]}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(bool(problems or faults))


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
