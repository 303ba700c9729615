"""Connections to NATS: a publisher's, which knows what has arrived, and a directory's, which reconnects by itself.

A publisher's connection ends when it is lost. The publisher then opens another one and resyncs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import open_input

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from semblend_trt.config import Settings
    from semblend_trt.fleet.directory import Directory, Worker
    from semblend_trt.fleet.events import Emitter, Notice

logger = logging.getLogger(__name__)

RESYNC_SUFFIX = ".resync"
MAX_REQUEST_BYTES = 1024
# The field of a message beside requests for a resync: a reuse profile whose promise is broken in a `namespace`.
BROKEN_PROFILE = "broken_profile"
_DIGEST_DIGITS = 64
# Seconds after which a server that has not answered counts as lost.
ANSWER_SECONDS = 5.0
STREAM_SECONDS, STREAM_BYTES, DUPLICATE_SECONDS = 3600, 256 << 20, 120
# The wait before another attempt: at first, and at most.
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 5.0
# Seconds between two checks for missed events.
TICK_SECONDS = 0.25
# Seconds after which a task that has not ended is cancelled again.
END_SECONDS = 1.0


class ConnectionLostError(SemBlendError):
    """The server did not take or did not acknowledge a message."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Where events are sent, and the credentials.

    The representation shows no secret. With `per_worker` each worker has its own subject: `subject` with the worker id
    appended. Readers accept a worker's events from it only, so the server's permissions decide who may send them."""

    servers: tuple[str, ...] = field(repr=False)
    subject: str
    stream: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    creds: Path | None = None
    token: str | None = field(default=None, repr=False)
    per_worker: bool = False

    @classmethod
    def of(cls, settings: Settings) -> ConnectionOptions | None:
        """Return the options that the settings ask for; None when no events are sent."""
        url, token = settings.nats_url, settings.nats_token
        if url is None:
            return None
        return cls(
            servers=tuple(filter(None, (each.strip() for each in url.get_secret_value().split(",")))),
            token=None if token is None else token.get_secret_value(),
            per_worker=settings.nats_subject_per_worker,
            subject=settings.nats_subject,
            stream=settings.nats_stream,
            tls_ca=settings.nats_tls_ca,
            tls_cert=settings.nats_tls_cert,
            tls_key=settings.nats_tls_key,
            creds=settings.nats_creds,
        )

    @property
    def subjects(self) -> str:
        """Return the subject of all workers' events; with `per_worker` it includes requests for a resync."""
        return f"{self.subject}.*" if self.per_worker else self.subject

    def client_arguments(self) -> dict[str, Any]:
        """Return arguments of `nats.connect` for one attempt. Raise OSError for TLS files that cannot be read."""
        arguments: dict[str, Any] = {
            "servers": list(self.servers),
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.05,
            "connect_timeout": ANSWER_SECONDS,
            "ping_interval": 10,
            "max_outstanding_pings": 2,
        }
        if self.tls_ca is not None or self.tls_cert is not None:
            arguments["tls"] = context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        if self.token is not None:
            arguments["token"] = self.token
        if self.creds is not None:
            arguments["user_credentials"] = str(self.creds)
        return arguments


async def connect_client(options: ConnectionOptions, **arguments: Any) -> Any:
    """Return a `nats` client after one attempt. Raise its exceptions, and ConfigurationError without nats-py."""
    try:
        import nats
    except ImportError as error:
        raise ConfigurationError("events need nats-py; install semblend-trt[nats]") from error

    has_warned = False

    async def erred(error: Exception) -> None:
        """Log a missing permission once: it ends no connection and shows nowhere else."""
        nonlocal has_warned
        if not has_warned and "permissions violation" in str(error).lower():
            has_warned = True
            logger.warning("NATS does not permit what this process needs, so that events are lost: %s", error)

    for path in filter(None, (options.tls_ca, options.tls_cert, options.tls_key, options.creds)):
        open_input(path).close()  # what reads it would wait for a pipe
    attempt = asyncio.ensure_future(nats.connect(**(options.client_arguments() | {"error_cb": erred} | arguments)))
    # asyncio would log the exception of an abandoned attempt if it were not read.
    attempt.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.wait_for(attempt, 2 * ANSWER_SECONDS)


async def flush(client: Any) -> None:
    """Wait until the server has taken all that the client was asked to send.

    Raise what the client raises, after ANSWER_SECONDS for each of two answers. nats-py 2.16 sends a flush's ping before
    what still waits to be written, so only a second answer comes after it."""
    for _ in range(2):
        await client.flush(timeout=ANSWER_SECONDS)


async def listen(client: Any, options: ConnectionOptions, take: Callable[[bytes, str | None], Awaitable[None]]) -> None:
    """Subscribe `take` to events; it gets each message and the worker id in its subject (None in a shared one)."""

    async def read(message: Any) -> None:
        sender = message.subject.rpartition(".")[2] if options.per_worker else None
        if message.subject != options.subject + RESYNC_SUFFIX:
            await take(message.data, sender)

    await client.subscribe(options.subjects, cb=read)


async def pause(failures: int) -> None:
    """Wait before another attempt; at random, so that not all workers come back to a server at once."""
    seconds = min(FIRST_RETRY_SECONDS * 2 ** min(failures, 16), LAST_RETRY_SECONDS)
    await asyncio.sleep(seconds * random.uniform(0.5, 1.0))


class Connection:
    """Sends one emitter's messages; made with `open`, in one event loop. `is_asked`: a reader asked for a resync;
    `is_id_twice`: it said that another live process has this worker id. `broken`: reuse profiles whose promise spot
    checks found broken, each with the key of the namespace."""

    def __init__(self, options: ConnectionOptions, emitter: Emitter) -> None:
        self._emitter, self._stream = emitter, options.stream
        self._subject = f"{options.subject}.{emitter.worker_id}" if options.per_worker else options.subject
        self._client: Any = None
        self._jetstream: Any = None
        self._acks: list[asyncio.Future[Any]] = []
        self.is_lost = self.is_asked = self.is_id_twice = False
        self.broken: list[tuple[str, str]] = []

    @classmethod
    async def open(cls, options: ConnectionOptions, emitter: Emitter) -> Connection:
        """Connect in one attempt; raise what the client raises."""
        connection = cls(options, emitter)
        name = f"semblend-trt worker {emitter.worker_id}.{emitter.dp_rank}"
        connection._client = client = await connect_client(options, closed_cb=connection._closed, name=name)
        try:
            await client.subscribe(options.subject + RESYNC_SUFFIX, cb=connection._asked)
            if options.stream is not None:
                connection._jetstream = client.jetstream(timeout=ANSWER_SECONDS)
                await _provide_stream(connection._jetstream, options.stream, options.subjects)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def send(self, notices: Sequence[Notice]) -> list[Notice]:
        """Send in order and wait until the server has all messages; return those that are too large for it.
        When messages may be lost, raise ConnectionLostError or the client's exception; send no more after that."""
        fit = [notice for notice in notices if len(notice.payload) <= self._client.max_payload]
        if self._jetstream is None:
            for notice in fit:
                await self._client.publish(self._subject, notice.payload)
            await flush(self._client)
        else:
            unsure = await self._store(fit)
            if unsure and await self._store(unsure):
                raise ConnectionLostError(f"{len(unsure)} events were not acknowledged by the stream")
        if self.is_lost:
            raise ConnectionLostError("the connection to NATS was lost while events were being sent")
        return [notice for notice in notices if len(notice.payload) > self._client.max_payload]

    async def close(self) -> None:
        """End the connection. Never raise, and wait ANSWER_SECONDS at most."""
        self.is_lost = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.close(), ANSWER_SECONDS)

    async def _store(self, notices: Sequence[Notice]) -> list[Notice]:
        """Publish to the stream, which stores each id once; return the messages without acknowledgement."""
        acks = self._acks = []
        sender = f"{self._emitter.worker_id}.{self._emitter.dp_rank}.{self._emitter.generation}"
        for notice in notices:
            acks.append(
                await self._jetstream.publish_async(
                    self._subject,
                    notice.payload,
                    wait_stall=ANSWER_SECONDS,
                    stream=self._stream,
                    headers={"Nats-Msg-Id": f"{sender}.{notice.event_id}"},
                )
            )
        if acks and not self.is_lost:
            await asyncio.wait(acks, timeout=ANSWER_SECONDS)
        return [
            notice
            for notice, ack in zip(notices, acks, strict=True)
            if not ack.done() or ack.cancelled() or ack.exception() is not None
        ]

    async def _asked(self, message: Any) -> None:
        request = meant(message.data, self._emitter)
        if request and BROKEN_PROFILE in request:
            profile, namespace = request[BROKEN_PROFILE], request.get("namespace")
            if all(isinstance(each, str) and len(each) == _DIGEST_DIGITS for each in (profile, namespace)):
                self.broken.append((str(profile), str(namespace)))
            return
        self.is_asked = self.is_asked or request is not None
        self.is_id_twice = self.is_id_twice or bool(request and request.get("id_twice") is True)

    async def _closed(self) -> None:
        self.is_lost = True
        # No more answers come.
        for ack in self._acks:
            ack.cancel()


async def _provide_stream(jetstream: Any, name: str, subjects: str) -> None:
    from nats.js.errors import NotFoundError

    try:
        await jetstream.stream_info(name)
    except NotFoundError:
        limits = {"max_age": STREAM_SECONDS, "max_bytes": STREAM_BYTES, "duplicate_window": DUPLICATE_SECONDS}
        await jetstream.add_stream(name=name, subjects=[subjects], **limits)


def meant(request: bytes, emitter: Emitter) -> dict[str, Any] | None:
    """Return a resync request for this emitter, empty or JSON that names its worker (and rank); None for any other."""
    try:
        wanted = json.loads(request or b"{}") if len(request) <= MAX_REQUEST_BYTES else None
    except (ValueError, RecursionError):
        return None
    own = {"worker_id": emitter.worker_id, "dp_rank": emitter.dp_rank}
    is_meant = isinstance(wanted, dict) and all(wanted.get(name, value) == value for name, value in own.items())
    return wanted if is_meant else None


class DirectoryReader:
    """Reads `options.subjects` into `directory` from `start` to `stop`, in their event loop.
    Reconnects for ever. No message makes it raise, and after each message other tasks of the loop have their turn."""

    def __init__(self, options: ConnectionOptions, directory: Directory) -> None:
        self._options, self._directory = options, directory
        self._task: asyncio.Task[None] | None = None
        self.connections = self.failures = 0

    async def start(self) -> None:
        """Start to read; return before there is a connection."""
        self._task = asyncio.create_task(self._run(), name="semblend-directory")

    async def stop(self) -> None:
        """Stop reading; the directory keeps its workers until they expire."""
        # Before Python 3.12, asyncio.wait_for loses a cancellation that arrives as the awaited task ends.
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=END_SECONDS)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._follow()
                failures = 0
            except ConfigurationError as error:
                logger.error("no donor events are read: %s", error)
                return
            except Exception as error:
                if not failures:
                    # The error's text may hold the server's address with a user and a password.
                    logger.warning("NATS is out of reach, donor events are not read: %s", type(error).__name__)
                failures += 1
            await pause(max(0, failures - 1))

    async def _follow(self) -> None:
        """Read over one connection until it is lost. Raise when it cannot be made."""
        lost, resync = asyncio.Event(), self._options.subject + RESYNC_SUFFIX

        async def closed() -> None:
            lost.set()

        client = await connect_client(self._options, closed_cb=closed, name="semblend-trt directory")
        try:
            await listen(client, self._options, self._read)
            # Events before this subscription are unknown, so all workers are asked for a resync.
            await client.publish(resync, b"")
            await flush(client)
            self.connections += 1
            warned: set[Worker] = set()
            while not lost.is_set():
                twice = self._directory.twice()
                for worker in {*self._directory.resyncs_due(), *(twice - warned)}:
                    asked = {"worker_id": worker[0], "dp_rank": worker[1], "id_twice": worker in twice}
                    await client.publish(resync, json.dumps(asked).encode())
                warned = twice
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(lost.wait(), TICK_SECONDS)
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), LAST_RETRY_SECONDS)

    async def _read(self, payload: bytes, sender: str | None) -> None:
        try:
            self._directory.observe(payload, sender)
        except Exception:
            self.failures += 1
            if self.failures == 1:  # the same failure may repeat with every message
                logger.exception("a message on the event subject could not be taken")
        await asyncio.sleep(0)
