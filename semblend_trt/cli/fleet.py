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
from dataclasses import asdict
from typing import TYPE_CHECKING

from semblend_trt.cli.events import add_listening, listen_to, options_of

if TYPE_CHECKING:
    import argparse

SUMMARY = "say who holds how much in the fleet, and what is wrong with it"
EXAMPLES = 20


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser("status", help=SUMMARY, description=f"{SUMMARY.capitalize()}.")
    add_listening(action, 30.0)


def run(arguments: argparse.Namespace) -> int:
    """Listen and print. Raises SemBlendError when it cannot listen."""
    from semblend_trt.fleet.directory import Directory, worker_name
    from semblend_trt.fleet.status import FleetStatus, fields_apart

    messages: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    sentences: deque[str] = deque(maxlen=EXAMPLES)

    def note(reason: str, sentence: str) -> None:
        faults[reason] += 1
        sentences.append(f"{reason}: {sentence}")

    def take(payload: bytes, sender: str | None) -> None:
        messages.update(messages=1, bytes=len(payload))
        directory.observe(payload, sender)

    directory = Directory(on_problem=note)
    asyncio.run(listen_to(options_of(arguments), take, arguments.seconds, arguments.limit, asks=True))
    status = FleetStatus.of(directory)
    held = {worker_name(each): list(followed.donors.values()) for each, followed in directory.workers().items()}
    of_workers = {name: {each.namespace.fields for each in donors if each.namespace} for name, donors in held.items()}
    if apart := fields_apart(of_workers):
        status.problems["apart"] = apart
    workers = [asdict(worker) for worker in status.workers]
    report = {**messages, "workers": workers, "problems": status.problems, "faults": faults, "examples": [*sentences]}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(bool(status.problems or faults))
