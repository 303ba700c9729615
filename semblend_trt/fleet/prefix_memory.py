"""PrefixMemory: which beginnings of prompts went to which worker, as hashes of blocks, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from semblend_trt.fleet.directory import Worker

BLOCK_TOKENS = 32
MAX_BLOCKS = 262_144
MAX_WORKERS = 1024


class PrefixMemory:
    """Remembers the last MAX_BLOCKS blocks of BLOCK_TOKENS tokens of each worker. Thread safe.

    A block is known by a 64-bit hash of everything up to its end, under the interpreter's key of this process.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._workers: OrderedDict[Worker, OrderedDict[int, None]] = OrderedDict()

    def prefix_of(self, token_ids: npt.ArrayLike, tenant_salt: str | None) -> list[int]:
        """The hashes of a prompt's whole blocks (integers [n]), each of all before it, the first of the salt too."""
        data = np.ascontiguousarray(token_ids, dtype=np.int64).tobytes()
        size = 8 * BLOCK_TOKENS
        before, hashes = hash((tenant_salt, "")), []
        for start in range(0, len(data) - size + 1, size):
            before = hash((before, data[start : start + size]))
            hashes.append(before)
        return hashes

    def known(self, prefix: list[int], workers: Iterable[Worker]) -> dict[Worker, int]:
        """How many tokens of `prefix`, from its beginning on, each of `workers` was sent."""
        with self._lock:
            return {worker: BLOCK_TOKENS * self._blocks_known(prefix, worker) for worker in workers}

    def note(self, prefix: list[int], worker: Worker) -> None:
        """Remembers that `worker` was sent `prefix`."""
        with self._lock:
            sent = self._workers.setdefault(worker, OrderedDict())
            self._workers.move_to_end(worker)
            if len(self._workers) > MAX_WORKERS:
                self._workers.popitem(last=False)
            # The beginning is noted last, so that it is forgotten last: without it the rest is of no use.
            for block in reversed(prefix[: self._max_blocks]):
                sent[block] = None
                sent.move_to_end(block)
            while len(sent) > self._max_blocks:
                sent.popitem(last=False)

    def _blocks_known(self, prefix: list[int], worker: Worker) -> int:
        sent = self._workers.get(worker)
        if sent is None:
            return 0
        return next((at for at, block in enumerate(prefix) if block not in sent), len(prefix))
