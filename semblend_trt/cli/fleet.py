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
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from semblend_trt.cli.events import add_listening, listen_to, options_of

if TYPE_CHECKING:
    import argparse

    from semblend_trt.fleet.directory import Worker
    from semblend_trt.namespace import CacheNamespace

SUMMARY = "say who holds how much in the fleet, and what is wrong with it"
EXAMPLES = 20


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser("status", help=SUMMARY, description=f"{SUMMARY.capitalize()}.")
    add_listening(action, 30.0)


def run(arguments: argparse.Namespace) -> int:
    """Listen and print. Raises SemBlendError when it cannot listen."""
    from semblend_trt.errors import NamespaceError
    from semblend_trt.fleet.directory import Directory
    from semblend_trt.fleet.events import DonorRegistered, EventError, decode
    from semblend_trt.fleet.status import FleetStatus
    from semblend_trt.namespace import CacheNamespace

    messages: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    sentences: deque[str] = deque(maxlen=EXAMPLES)
    namespaces: dict[Worker, dict[str, CacheNamespace]] = {}

    def note(reason: str, sentence: str) -> None:
        faults[reason] += 1
        sentences.append(f"{reason}: {sentence}")

    def take(payload: bytes, sender: str | None) -> None:
        messages.update(messages=1, bytes=len(payload))
        directory.observe(payload, sender)
        with suppress(EventError, NamespaceError):
            event = decode(payload)
            if isinstance(event.data, DonorRegistered):
                namespace = CacheNamespace.from_dict(event.data.namespace)
                namespaces.setdefault((event.worker_id, event.dp_rank), {})[namespace.key] = namespace

    directory = Directory(on_problem=note)
    asyncio.run(listen_to(options_of(arguments), take, arguments.seconds, arguments.limit, asks=True))
    known = directory.workers()
    status = FleetStatus.of(directory, {each: [*found.values()] for each, found in namespaces.items() if each in known})
    workers = [asdict(worker) for worker in status.workers]
    report = {**messages, "workers": workers, "problems": status.problems, "faults": faults, "examples": [*sentences]}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(bool(status.problems or faults))
