"""Tells who is known of the fleet, and what is wrong with it.

The server and the subject are those of the settings (SEMBLEND_NATS_URL and so on) unless they are given here. `status`
asks the workers for all their donors, listens for a while, at least for a heartbeat of each, and prints a report in
JSON. It exits with 1 when two live processes have one worker id, a worker's events are old or missing, or the workers'
namespaces do not meet, and with 2 when it cannot listen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from semblend_trt.cli.events import add_listening, listen_to, options_of

if TYPE_CHECKING:
    import argparse

    from semblend_trt.fleet.directory import Worker
    from semblend_trt.namespace import CacheNamespace

SUMMARY = "tell who is known of the fleet, and what is wrong with it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the action and its arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser("status", help=SUMMARY, description=f"{SUMMARY.capitalize()}.")
    add_listening(action, 30.0)


def run(arguments: argparse.Namespace) -> int:
    """Listen and print. Raises SemBlendError when it cannot listen."""
    from semblend_trt.errors import NamespaceError
    from semblend_trt.fleet.directory import Directory
    from semblend_trt.fleet.events import DonorRegistered, decode
    from semblend_trt.fleet.status import FleetStatus
    from semblend_trt.fleet.wire import EventError
    from semblend_trt.namespace import CacheNamespace

    directory = Directory()
    namespaces: dict[Worker, dict[str, CacheNamespace]] = {}

    def take(payload: bytes, sender: str | None) -> None:
        directory.observe(payload, sender)
        with suppress(EventError, NamespaceError):
            event = decode(payload)
            if isinstance(event.data, DonorRegistered):
                namespace = CacheNamespace.from_dict(event.data.namespace)
                namespaces.setdefault((event.worker_id, event.dp_rank), {})[namespace.key] = namespace

    asyncio.run(listen_to(options_of(arguments), take, arguments.seconds, arguments.limit, asks=True))
    known = directory.workers()
    held = {worker: list(found.values()) for worker, found in namespaces.items() if worker in known}
    status = FleetStatus.of(directory, held)
    report = {"workers": [asdict(worker) for worker in status.workers], "problems": status.problems}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(bool(status.problems))
