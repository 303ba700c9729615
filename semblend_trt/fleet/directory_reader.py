"""DirectoryReader: feeds a directory from NATS, over lost servers, and asks workers for what was missed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.connection import RESYNC_SUFFIX, connect_client, listen
from semblend_trt.fleet.publisher import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS

if TYPE_CHECKING:
    from semblend_trt.fleet.connection import ConnectionOptions
    from semblend_trt.fleet.directory import Directory

logger = logging.getLogger(__name__)

# How often missed events are looked for, in seconds.
TICK_SECONDS = 0.25
# How long a task that was told to end may take before it is told again, in seconds.
END_SECONDS = 1.0


class DirectoryReader:
    """Reads `options.subjects` into `directory` from `start` to `stop`, in the event loop that calls them.

    A server that is out of reach is tried again for ever. Whatever stands in a message, nothing is raised. After each
    message other tasks of the loop have their turn.
    """

    def __init__(self, options: ConnectionOptions, directory: Directory) -> None:
        self._options, self._directory = options, directory
        self._task: asyncio.Task[None] | None = None
        self.connections = self.failures = 0

    async def start(self) -> None:
        """Begins to read; returns before there is a connection."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="semblend-directory")

    async def stop(self) -> None:
        """Ends reading; the directory keeps what it knows until that expires."""
        task, self._task = self._task, None
        # A cancellation that meets the end of what is waited for is lost: in asyncio.wait_for before Python 3.12.
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=END_SECONDS)

    async def _run(self) -> None:
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._follow()
                retry_seconds = FIRST_RETRY_SECONDS
                await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))
            except ConfigurationError as error:
                logger.error("no donor events are read: %s", error)
                return
            except Exception as error:
                if retry_seconds == FIRST_RETRY_SECONDS:
                    # An error's text may hold the server's address, which may name a user and a password.
                    logger.warning("NATS is out of reach, donor events are not read: %s", type(error).__name__)
                await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))
                retry_seconds = min(2 * retry_seconds, LAST_RETRY_SECONDS)

    async def _follow(self) -> None:
        """One connection, from its making to its loss. Raises whatever keeps it from being made."""
        lost = asyncio.Event()

        async def closed() -> None:
            lost.set()

        client = await connect_client(self._options, closed_cb=closed, name="semblend-trt directory")
        try:
            await listen(client, self._options, self._read)
            # Whatever was said before this subscription is unknown; all workers are asked.
            await client.publish(self._options.subject + RESYNC_SUFFIX, b"")
            await client.flush()
            self.connections += 1
            while not lost.is_set():
                for worker_id, dp_rank in self._directory.resyncs_due():
                    request = json.dumps({"worker_id": worker_id, "dp_rank": dp_rank})
                    await client.publish(self._options.subject + RESYNC_SUFFIX, request.encode())
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
            if self.failures == 1:  # what fails once may fail with every message
                logger.exception("a message on the event subject could not be taken")
        await asyncio.sleep(0)
