"""Shows the donor events of the fleet: each one (tail), what is wrong with them (check), who holds how much (stats).

The server and the subject are those of the settings (SEMBLEND_NATS_URL and so on) unless they are given here. `check`
and `stats` ask the workers for all donors again, to compare them with the heartbeats, and print a report in JSON.
`check` exits with 1 when something is wrong, and each action with 2 when it cannot listen.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semblend_trt.command_line import count, printable
from semblend_trt.errors import ConfigurationError, SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.fleet.connection import ConnectionOptions
    from semblend_trt.fleet.directory import FollowedWorker

SUMMARY = "show, check or count the fleet's donor events"
DEFAULT_URL = "nats://127.0.0.1:4222"
MAX_SECONDS = 86400
EXAMPLES = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary, seconds in (
        ("tail", "print every event, one a line", None),
        ("check", "listen for a while and tell what is wrong", 30.0),
        ("stats", "listen for a while and tell who holds how much", 30.0),
    ):
        action = actions.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        add_listening(action, seconds)
        action.add_argument("--json", action="store_true", help="print JSON, as reports always are")


def add_listening(action: argparse.ArgumentParser, seconds: float | None) -> None:
    """Add where and how long to listen, by default for `seconds`."""
    action.add_argument("--url", help=f"NATS server, in place of SEMBLEND_NATS_URL or {DEFAULT_URL}")
    action.add_argument("--subject", help="subject, in place of SEMBLEND_NATS_SUBJECT")
    default = "until it is interrupted" if seconds is None else "%(default)s"
    action.add_argument("--seconds", type=_seconds, default=seconds, help=f"how long to listen (default: {default})")
    action.add_argument("--limit", type=count, help="stop after this many messages")


@dataclass(slots=True)
class _Seen:
    messages: int = 0
    size: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    sentences: deque[str] = field(default_factory=lambda: deque(maxlen=EXAMPLES))

    def note(self, reason: str, sentence: str) -> None:
        self.problems[reason] += 1
        self.sentences.append(f"{reason}: {sentence}")


def run(arguments: argparse.Namespace) -> int:
    """Listen and print. Raises SemBlendError when it cannot listen."""
    from semblend_trt.fleet.directory import Directory

    seen, is_tail = _Seen(), arguments.action == "tail"
    # Its clock does not run, so that workers that fall silent stay in the report.
    directory = Directory(clock=lambda: 0.0, on_problem=seen.note)

    def show(payload: bytes, sender: str | None) -> None:
        seen.messages, seen.size = seen.messages + 1, seen.size + len(payload)
        is_event = directory.observe(payload, sender) is not None
        if is_tail and is_event:
            _say(_line(payload, as_json=arguments.json))
        elif is_tail:
            _say(printable(f"not an event ({len(payload)} bytes): {seen.sentences[-1]}"))

    asyncio.run(listen_to(options_of(arguments), show, arguments.seconds, arguments.limit, asks=not is_tail))
    if is_tail:
        return 0
    workers = directory.workers()
    if arguments.action == "stats":
        held = {f"{worker_id}.{rank}": _stats_of(each) for (worker_id, rank), each in workers.items()}
        _say(json.dumps({"messages": seen.messages, "bytes": seen.size, "workers": held}, indent=2))
        return 0
    report = {
        "messages": seen.messages,
        "workers": len(workers),
        "heartbeats_compared": sum(each.compared for each in workers.values()),
        "problems": dict(seen.problems),
        "examples": list(seen.sentences),
    }
    _say(json.dumps(report, indent=2))
    return int(bool(seen.problems))


def options_of(arguments: argparse.Namespace) -> ConnectionOptions:
    """Return the connection of the arguments and the settings."""
    from semblend_trt.config import load_settings
    from semblend_trt.fleet.connection import ConnectionOptions

    given = {"nats_subject": arguments.subject, "nats_url": arguments.url}
    given = {name: value for name, value in given.items() if value is not None}
    settings = load_settings(**given)
    if settings.nats_url is None:
        settings = load_settings(**given, nats_url=DEFAULT_URL)
    options = ConnectionOptions.of(settings)
    assert options is not None
    # Reading needs no stream: what is published to one goes to every subscriber as well.
    return replace(options, stream=None)


async def listen_to(
    options: ConnectionOptions,
    show: Callable[[bytes, str | None], None],
    seconds: float | None,
    limit: int | None,
    *,
    asks: bool,
) -> None:
    """Show each message for `seconds`, and `limit` messages at most. Raises SemBlendError when it cannot listen."""
    from semblend_trt.config import masked
    from semblend_trt.fleet.connection import RESYNC_SUFFIX, connect_client, flush, listen

    ended, is_lost, left = asyncio.Event(), False, limit or sys.maxsize

    async def take(payload: bytes, sender: str | None) -> None:
        nonlocal left
        if not ended.is_set():
            show(payload, sender)
            left -= 1
            if not left:
                ended.set()

    async def closed() -> None:
        nonlocal is_lost
        is_lost = is_lost or not ended.is_set()
        ended.set()

    try:
        client = await connect_client(options, closed_cb=closed, name="semblend-trt events")
    except ConfigurationError:
        raise
    except Exception as error:
        servers = masked(",".join(options.servers))
        raise SemBlendError(
            f"NATS is out of reach at {servers} ({type(error).__name__}); start it, or give its address with --url"
        ) from None
    try:
        await listen(client, options, take)
        if asks:
            await client.publish(options.subject + RESYNC_SUFFIX, b"")
        await flush(client)
        sys.stderr.write(f"listening on {options.subjects}\n")
        sys.stderr.flush()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
        ended.set()
        if is_lost:
            raise SemBlendError("the connection to NATS was lost; start again when it is back")
    finally:
        await client.close()


def _line(payload: bytes, *, as_json: bool) -> str:
    from semblend_trt.fleet.events import decode, shown

    event = decode(payload)
    message = shown(event)
    if as_json:
        return json.dumps(message)
    data = {key: value for key, value in message["data"].items() if key not in ("namespace", "segments", "block_ids")}
    kind, place = data.pop("kind"), data.pop("location", None) or data.pop("new_location", None)
    if isinstance(place, dict) and "tier" in place:
        data["tier"] = place["tier"]
    details = " ".join(f"{key}={json.dumps(value)}" for key, value in data.items())
    return printable(f"{event.worker_id}.{event.dp_rank} #{event.event_id} {kind} {details}")


def _stats_of(worker: FollowedWorker) -> dict[str, Any]:
    tokens: Counter[str] = Counter()
    for donor in worker.donors.values():
        tokens[donor.tier] += donor.tokens
    return {
        "generation": worker.generation,
        "donors": len(worker.donors),
        "tokens": dict(tokens),
        "tenants": len({donor.tenant_key for donor in worker.donors.values()}),
        "events": dict(worker.events),
    }


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= MAX_SECONDS:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and up to {MAX_SECONDS}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
