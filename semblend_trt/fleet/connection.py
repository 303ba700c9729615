"""Connections to NATS: made again whenever one is lost, with a publisher or a directory's reader at this end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semblend_trt.background import quiet_logger
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import open_input

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from semblend_trt.config import Settings
    from semblend_trt.fleet.directory import Directory
    from semblend_trt.fleet.events import Emitter, Notice

logger = quiet_logger(__name__)

RESYNC_SUFFIX = ".resync"
MAX_REQUEST_BYTES = 1024
# The field of a message beside requests for a resync: a reuse profile whose promise is broken in a `namespace`.
BROKEN_PROFILE = "broken_profile"
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
        if settings.nats_url is None:
            return None
        servers = tuple(filter(None, (each.strip() for each in settings.nats_url.get_secret_value().split(","))))
        token = None if settings.nats_token is None else settings.nats_token.get_secret_value()
        sent_to = settings.nats_subject, settings.nats_stream
        tls = settings.nats_tls_ca, settings.nats_tls_cert, settings.nats_tls_key
        return cls(servers, *sent_to, *tls, settings.nats_creds, token, settings.nats_subject_per_worker)

    @property
    def subjects(self) -> str:
        """Return the subject of all workers' events; with `per_worker` it includes requests for a resync."""
        return f"{self.subject}.*" if self.per_worker else self.subject

    def client_arguments(self) -> dict[str, Any]:
        """Return arguments of `nats.connect` for one attempt. Raise OSError for TLS files that cannot be read."""
        tls = None
        if self.tls_ca is not None or self.tls_cert is not None:
            tls = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                tls.load_cert_chain(self.tls_cert, self.tls_key)
        return {
            "servers": list(self.servers),
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.05,
            "connect_timeout": ANSWER_SECONDS,
            "ping_interval": 10,
            "max_outstanding_pings": 2,
            "tls": tls,
            "token": self.token,
            "user_credentials": None if self.creds is None else str(self.creds),
        }


async def connect_client(options: ConnectionOptions, **arguments: Any) -> Any:
    """Return a `nats` client after one attempt. Raise its exceptions, and ConfigurationError without nats-py."""
    try:
        import nats
    except ImportError as error:
        raise ConfigurationError("events need nats-py; install semblend-trt[nats]") from error

    async def erred(error: Exception) -> None:
        """Log a missing permission: it ends no connection and shows nowhere else."""
        if "permissions violation" in str(error).lower():
            logger.warning("NATS does not permit what this process needs, so that events are lost: %s", error)

    for path in filter(None, (options.tls_ca, options.tls_cert, options.tls_key, options.creds)):
        open_input(path).close()  # what reads it would wait for a pipe
    attempt = asyncio.ensure_future(nats.connect(**(options.client_arguments() | {"error_cb": erred} | arguments)))
    # asyncio would log the exception of an abandoned attempt if it were not read.
    attempt.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.wait_for(attempt, 2 * ANSWER_SECONDS)


async def follow(
    options: ConnectionOptions,
    use: Callable[[Any, asyncio.Event], Awaitable[bool]],
    cost: str,
    failed: Callable[[], None] = lambda: None,
    **arguments: Any,
) -> None:
    """Connect again and again, and await `use(client, lost)` over each connection; end once it returns True. `lost` is
    set when the connection is. After an error `failed` is called; the first in a row is logged with its `cost`. The
    waits between attempts are random, so that not all workers come back to a server at once."""
    failures = 0
    while True:
        lost, client = asyncio.Event(), None

        async def closed(lost: asyncio.Event = lost) -> None:
            lost.set()

        try:
            client = await connect_client(options, closed_cb=closed, **arguments)
            if await use(client, lost):
                return
            failures = 0
        except ConfigurationError as error:
            logger.error("%s: %s", cost, error)
            return
        except Exception as error:
            if not failures:
                # The text of a failed attempt's error may hold the server's address with a user and a password.
                known = None if client is None else error
                logger.warning("NATS is out of reach, %s: %s", cost, type(error).__name__, exc_info=known)
            failed()
            failures += 1
        finally:
            if client is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(client.close(), ANSWER_SECONDS)
        seconds = min(FIRST_RETRY_SECONDS * 2 ** min(max(0, failures - 1), 16), LAST_RETRY_SECONDS)
        await asyncio.sleep(seconds * random.uniform(0.5, 1.0))


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: before Python 3.12, asyncio.wait_for loses a cancellation that arrives as the
    awaited task ends."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=END_SECONDS)


async def flush(client: Any) -> None:
    """Wait until the server has taken all that the client was asked to send. Raise what the client raises, after
    ANSWER_SECONDS for each of two answers: nats-py 2.16 sends a flush's ping before what still waits to be written."""
    for _ in range(2):
        await client.flush(timeout=ANSWER_SECONDS)


async def listen(
    client: Any, options: ConnectionOptions, take: Callable[[bytes, str | None], Awaitable[None]], *, asks: bool
) -> None:
    """Subscribe `take` to events; it gets each message and the worker id in its subject (None in a shared one).
    Return once the server has the subscription, and where it `asks` a request for all workers' resync."""

    async def read(message: Any) -> None:
        sender = message.subject.rpartition(".")[2] if options.per_worker else None
        if message.subject != options.subject + RESYNC_SUFFIX:
            await take(message.data, sender)

    await client.subscribe(options.subjects, cb=read)
    if asks:
        await client.publish(options.subject + RESYNC_SUFFIX, b"")
    await flush(client)


class Sender:
    """Sends one emitter's messages over a client, to a stream where the options name one; made with `over`."""

    def __init__(self, client: Any, options: ConnectionOptions, emitter: Emitter) -> None:
        self._client, self._emitter, self._stream = client, emitter, options.stream
        self._subject = f"{options.subject}.{emitter.worker_id}" if options.per_worker else options.subject
        self._jetstream: Any = None if options.stream is None else client.jetstream(timeout=ANSWER_SECONDS)

    @classmethod
    async def over(cls, client: Any, options: ConnectionOptions, emitter: Emitter) -> Sender:
        """Return a sender, once there is its stream; raise what the client raises."""
        sender = cls(client, options, emitter)
        if sender._jetstream is not None:
            from nats.js.errors import NotFoundError

            try:
                await sender._jetstream.stream_info(options.stream)
            except NotFoundError:
                limits = {"max_age": STREAM_SECONDS, "max_bytes": STREAM_BYTES, "duplicate_window": DUPLICATE_SECONDS}
                await sender._jetstream.add_stream(name=options.stream, subjects=[options.subjects], **limits)
        return sender

    async def send(self, notices: Sequence[Notice]) -> list[Notice]:
        """Send in order and wait until the server has all messages; return those that are too large for it.
        When messages may be lost, raise ConnectionLostError or the client's exception; send no more after that."""
        most = self._client.max_payload
        fit = [notice for notice in notices if len(notice.payload) <= most]
        if self._jetstream is None:
            for notice in fit:
                await self._client.publish(self._subject, notice.payload)
            await flush(self._client)
        else:
            if (unsure := await self._store(fit)) and await self._store(unsure):
                raise ConnectionLostError(f"{len(unsure)} events were not acknowledged by the stream")
        if self._client.is_closed:
            raise ConnectionLostError("the connection to NATS was lost while events were being sent")
        return [notice for notice in notices if len(notice.payload) > most]

    async def _store(self, notices: Sequence[Notice]) -> list[Notice]:
        """Publish to the stream, which stores each id once; return the messages without acknowledgement."""
        sender = f"{self._emitter.worker_id}.{self._emitter.dp_rank}.{self._emitter.generation}"
        publish = functools.partial(self._jetstream.publish, self._subject, stream=self._stream)
        asked = (publish(each.payload, headers={"Nats-Msg-Id": f"{sender}.{each.event_id}"}) for each in notices)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [notice for notice, each in zip(notices, answers, strict=True) if isinstance(each, BaseException)]


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

    async def start(self) -> None:
        """Start to read; return before there is a connection."""
        following = follow(self._options, self._follow, "no donor events are read", name="semblend-trt directory")
        self._task = asyncio.create_task(following, name="semblend-directory")

    async def stop(self) -> None:
        """Stop reading; the directory keeps its workers until they expire."""
        if self._task is not None:
            await end(self._task)

    async def _follow(self, client: Any, lost: asyncio.Event) -> bool:
        resync, warned = self._options.subject + RESYNC_SUFFIX, set[Any]()
        await listen(client, self._options, self._read, asks=True)  # events before this subscription are unknown
        while not lost.is_set():
            twice = self._directory.twice()
            for worker in {*self._directory.resyncs_due(), *(twice - warned)}:
                asked = {"worker_id": worker[0], "dp_rank": worker[1], "id_twice": worker in twice}
                await client.publish(resync, json.dumps(asked).encode())
            warned = twice
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(lost.wait(), TICK_SECONDS)
        return False

    async def _read(self, payload: bytes, sender: str | None) -> None:
        try:
            self._directory.observe(payload, sender)
        except Exception:
            logger.exception("a message on the event subject could not be taken")
        await asyncio.sleep(0)
