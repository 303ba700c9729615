"""EngineThread: an embedded LLM on a thread of its own, which runs the requests of an event loop together."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from engine_wrapper.embedded.llm import LLM, RequestOutput, RequestStream, SamplingParams

logger = logging.getLogger(__name__)

MAX_REQUESTS = 256
# How long the thread sleeps between two looks at transfers when nothing else can run, in seconds.
IDLE_PAUSE = 0.001


class EngineStoppedError(SemBlendError):
    """The engine has failed or was shut down; it takes no more requests."""


class BusyError(SemBlendError):
    """As many requests run as may."""


@dataclass(slots=True, eq=False)
class _Job:
    """One request on its way: the outputs that are there, or the error that ended it, for its event loop."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    stream: RequestStream | None = None

    def tell(self, news: RequestOutput | Exception) -> None:
        """Called by the engine's thread. A loop that has ended needs no news."""
        try:
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)
        except RuntimeError:
            logger.debug("a request's event loop has ended before it")


class EngineThread:
    """Serves `llm` until `close`, which shuts it down. At most `max_requests` are taken at a time."""

    def __init__(self, llm: LLM, max_requests: int = MAX_REQUESTS) -> None:
        self._llm, self._max_requests = llm, max_requests
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[_Job] = []
        self._taken = 0
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the engine takes no more requests; None while it does."""
        return self._failure

    @property
    def running(self) -> int:
        """Requests taken and not ended. Belongs to the event loop."""
        return self._taken

    async def outputs(
        self, token_ids: list[int], params: SamplingParams, cache_salt: str | None, *, streaming: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request: its partial outputs when `streaming`, and the final one. Closing it early aborts it.

        Raises ConfigurationError or CapacityError when the engine can never take it, BusyError when too many run, and
        EngineStoppedError.
        """
        if self._taken >= self._max_requests:
            raise BusyError(f"{self._taken} requests are running or waiting, the most there may be; try later")
        job = _Job(asyncio.get_running_loop())
        with self._lock:
            if self._failure is not None:
                raise self._stopped()
            self._orders.put(lambda: self._start(job, token_ids, params, cache_salt, streaming))
        self._taken += 1
        try:
            while True:
                news = await job.news.get()
                if isinstance(news, Exception):
                    raise news
                yield news
                if news.finished:
                    return
        finally:
            self._taken -= 1
            self._orders.put(lambda: self._end(job))

    def close(self, timeout: float = 10.0) -> None:
        """Aborts what runs, shuts the engine down and ends the thread."""
        if self._thread.is_alive():
            self._orders.put(self._stop)
            self._thread.join(timeout)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure = "it was shut down"
        try:
            while not self._is_closing:
                self._take_orders()
                if self._jobs:
                    self._llm.run_until(self._has_news)
                self._deliver()
        except Exception as error:
            logger.exception("the engine has failed and takes no more requests")
            failure = str(error) or type(error).__name__
        with self._lock:  # from here on nothing more is ordered
            self._failure = failure
        for job in self._jobs:
            job.tell(self._stopped())
        while not self._orders.empty():
            self._orders.get()()
        try:
            self._llm.shutdown()
        except Exception:
            logger.exception("the engine did not shut down in order")

    def _take_orders(self) -> None:
        """Carries out what was ordered. Where nothing runs it waits for an order, and sees to it that what was served
        is kept meanwhile."""
        while not self._is_closing:
            is_idle = not self._jobs
            executor = self._llm.executor
            timeout = IDLE_PAUSE if executor.pending_transfers else None
            try:
                order = self._orders.get(block=is_idle, timeout=timeout)
            except queue.Empty:
                if not is_idle:
                    return
                executor.poll_transfers()
            else:
                order()

    def _has_news(self) -> bool:
        return not self._orders.empty() or any(job.stream is not None and job.stream.has_news() for job in self._jobs)

    def _start(
        self, job: _Job, token_ids: list[int], params: SamplingParams, cache_salt: str | None, streaming: bool
    ) -> None:
        if self._failure is not None:
            job.tell(self._stopped())
            return
        try:
            job.stream = self._llm.generate_async(token_ids, params, streaming, cache_salt)
        except Exception as error:  # one request's trouble is no other's
            job.tell(error)
        else:
            self._jobs.append(job)

    def _end(self, job: _Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        if job.stream is not None and self._failure is None:
            job.stream.close()

    def _stop(self) -> None:
        self._is_closing = True

    def _stopped(self) -> EngineStoppedError:
        return EngineStoppedError(f"the engine has stopped: {self._failure}")

    def _deliver(self) -> None:
        for job in list(self._jobs):
            assert job.stream is not None
            while job.stream.has_news():
                output = next(job.stream)
                job.tell(output)
                if output.finished:
                    self._jobs.remove(job)
                    break
