"""Shows the donor events of the fleet, one a line.

The server and the subject are those of the settings (SEMBLEND_NATS_URL and so on) unless they are given here. It exits
with 2 when it cannot listen. `semblend-trt fleet status` says who holds how much and what is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial

from semblend_trt.cli.config import masked
from semblend_trt.command_line import count, number_up_to, printable
from semblend_trt.config import load_settings
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.fleet.connection import ConnectionOptions, connect_client, listen

SUMMARY = "print every donor event of the fleet, one a line"
DEFAULT_URL = "nats://127.0.0.1:4222"
MAX_SECONDS = 86400


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    tail = actions.add_parser("tail", help=SUMMARY, description=f"{SUMMARY.capitalize()}.")
    add_listening(tail, None)
    tail.add_argument("--json", action="store_true", help="print JSON")


def add_listening(action: argparse.ArgumentParser, seconds: float | None) -> None:
    """Add where and how long to listen, by default for `seconds`."""
    action.add_argument("--url", help=f"NATS server, in place of SEMBLEND_NATS_URL or {DEFAULT_URL}")
    action.add_argument("--subject", help="subject, in place of SEMBLEND_NATS_SUBJECT")
    default = "until it is interrupted" if seconds is None else "%(default)s"
    most = partial(number_up_to, MAX_SECONDS, "number")
    action.add_argument("--seconds", type=most, default=seconds, help=f"how long to listen (default: {default})")
    action.add_argument("--limit", type=count, help="stop after this many messages")


def run(arguments: argparse.Namespace) -> int:
    """Listen and print. Raises SemBlendError when it cannot listen."""
    from semblend_trt.fleet.events import EventError

    def show(payload: bytes, _: str | None) -> None:
        try:
            line = _line(payload, as_json=arguments.json)
        except EventError as error:
            line = printable(f"not an event ({len(payload)} bytes): {error.reason}: {error}")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    asyncio.run(listen_to(arguments, show, asks=False))
    return 0


def options_of(arguments: argparse.Namespace) -> ConnectionOptions:
    given = {"nats_subject": arguments.subject, "nats_url": arguments.url}
    settings = load_settings(**{name: value for name, value in given.items() if value is not None})
    if (options := ConnectionOptions.of(settings)) is not None:
        return options
    arguments.url = DEFAULT_URL
    return options_of(arguments)


async def listen_to(arguments: argparse.Namespace, show: Callable[[bytes, str | None], None], *, asks: bool) -> None:
    """Show messages as the arguments of `add_listening` say. Raises SemBlendError when it cannot listen."""
    options, ended, is_lost, left = options_of(arguments), asyncio.Event(), False, arguments.limit or sys.maxsize

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
    async with client:
        await listen(client, options, take, asks=asks)
        sys.stderr.write(f"listening on {options.subjects}\n")
        sys.stderr.flush()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), arguments.seconds)
        ended.set()
        if is_lost:
            raise SemBlendError("the connection to NATS was lost; start again when it is back")


def _line(payload: bytes, *, as_json: bool) -> str:
    import msgspec

    from semblend_trt.fleet.events import decode

    event = decode(payload)
    message = msgspec.to_builtins(event, enc_hook=list)
    if as_json:
        return json.dumps(message)
    data = {key: value for key, value in message["data"].items() if key not in ("namespace", "segments", "block_ids")}
    kind, place = data.pop("kind"), data.pop("location", None) or data.pop("new_location", None)
    if isinstance(place, dict) and "tier" in place:
        data["tier"] = place["tier"]
    details = " ".join(f"{key}={json.dumps(value)}" for key, value in data.items())
    return printable(f"{event.worker_id}.{event.dp_rank} #{event.event_id} {kind} {details}")
