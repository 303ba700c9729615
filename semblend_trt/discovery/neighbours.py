"""Semantic neighbours of requests, found beside serving: texts are embedded and searched by a thread of its own.

Neighbours are reported and nothing else. They authorise no reuse; that takes equal tokens.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from semblend_trt.discovery.neighbour_worker import Job, JobKind, NeighbourWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.discovery.embedder import Embedder
    from semblend_trt.discovery.neighbour import Listener, Neighbour

QUEUE_LENGTH = 256
NEAREST = 5


class Neighbours:
    """The nearest donors of each request. Every call returns at once; none raises and none waits for an embedding.

    `open_embedder` and `open_decoder` are called on the thread; the decoder turns token ids int32 [n] into text. When
    either raises, one warning says why and nothing is found from then on. At most `queue_length` texts wait; what comes
    on top is dropped and counted. Ends with `close`, or when nobody holds it.
    """

    def __init__(
        self,
        open_embedder: Callable[[], Embedder],
        open_decoder: Callable[[], Callable[[npt.NDArray[np.int32]], str]],
        listener: Listener,
        *,
        min_similarity: float,
        queue_length: int = QUEUE_LENGTH,
    ) -> None:
        self._worker = NeighbourWorker(open_embedder, open_decoder, listener, min_similarity, queue_length, NEAREST)
        self._worker.start()
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def donor_held(self, namespace_key: str, donor_id: str, tokens: npt.NDArray[np.int32]) -> None:
        """Has a donor's text, token ids int32 [n], embedded and entered."""
        self._worker.submit(Job(JobKind.DONOR, namespace_key, donor_id, tokens))

    def donor_gone(self, donor_id: str) -> None:
        """Takes a donor out; from now on nothing names it. Never dropped."""
        self._worker.forget(donor_id)

    def look_up(self, request_id: int, namespace_key: str, tokens: npt.NDArray[np.int32]) -> None:
        """Has the nearest donors of a prompt, token ids int32 [n], found among those entered by then."""
        self._worker.submit(Job(JobKind.REQUEST, namespace_key, request_id, tokens))

    def nearest(self, request_id: int) -> tuple[Neighbour, ...]:
        """Held donors at least `min_similarity` near, the nearest first, as far as they are known by now."""
        return self._worker.nearest(request_id)

    @property
    def refusal(self) -> str | None:
        """Why nothing is found in this process, None while that may change or all is well."""
        return self._worker.refusal

    def settle(self, timeout: float) -> bool:
        """Waits until everything submitted is done, at most `timeout` seconds; False when it is not."""
        return self._worker.settle(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the thread, at most `timeout` seconds after the text that it is embedding. May be called twice."""
        self._finalizer()
        self._worker.join(timeout)
