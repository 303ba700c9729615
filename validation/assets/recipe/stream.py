"""Training batches written by worker processes ahead of the trainer, so that the GPU never waits for text."""

from __future__ import annotations

import collections
import multiprocessing
import os
import queue
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .tasks import TaskWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    Batch = tuple[NDArray[np.uint16], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Source:
    """What the writers draw from."""

    tokenizer: Tokenizer
    books: Sequence[str]
    corpus: NDArray[np.uint16]
    seed: int


class BatchStream:
    """Batches of one shape; when the writers fall behind, recent batches are served again and counted in `repeats`."""

    def __init__(self, source: Source, rows: int, length: int, text_share: float, workers: int, ahead: int) -> None:
        # Forked workers share the books; the parent must not have touched the GPU yet.
        context = multiprocessing.get_context("fork")
        self._queue: Any = context.Queue(maxsize=ahead)
        self._recent: collections.deque[Batch] = collections.deque(maxlen=256)
        self._rng = random.Random(source.seed)
        self.length = length
        self.repeats = 0
        self._workers = [
            context.Process(target=_write, args=(source, number, rows, length, text_share, self._queue), daemon=True)
            for number in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def next(self) -> Batch:
        """Return ids and weights of shape (rows, length)."""
        try:
            batch: Batch = self._queue.get(block=len(self._recent) < 16)
        except queue.Empty:
            self.repeats += 1
            return self._recent[self._rng.randrange(len(self._recent))]
        self._recent.append(batch)
        return batch

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.terminate()


def _write(source: Source, number: int, rows: int, length: int, text_share: float, batches: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    seed = (source.seed * 1_000 + number) * 10_000 + length
    writer = TaskWriter(source.tokenizer, source.books, source.corpus, seed)
    while True:
        batches.put(writer.batch(rows, length, text_share))
