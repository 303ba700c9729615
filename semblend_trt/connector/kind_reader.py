"""KindReader: finds out in the background of what kinds donors' texts are, for eviction policies that weigh them."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from semblend_trt.background import Background
from semblend_trt.donors.block_kind import kinds_of
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.donors.block_kind import KindMix
    from semblend_trt.donors.eviction import Eviction

logger = logging.getLogger(__name__)

# Donors beyond keep the weight of text of no known kind; reading them late would be worth little.
MAX_WAITING = 64


class KindReader:
    """Turns token ids back into text with the engine's tokenizer, off the serving path.

    `load` gives something with `decode(ids)`; it is called in the background, at the first donor. Where that fails
    nothing is read, which is said once.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._tokenizer: Any = None
        self._has_failed = False
        self._waiting: deque[tuple[str, npt.NDArray[np.int32]]] = deque()
        self._known: deque[tuple[str, KindMix]] = deque()
        self._thread = Background("semblend-kinds")

    def read(self, donor_id: str, tokens: npt.NDArray[np.int32]) -> None:
        """Begins to read a donor's text (int32 [n], which nobody changes)."""
        if not self._has_failed and len(self._waiting) < MAX_WAITING:
            self._waiting.append((donor_id, tokens))
            self._thread.submit(self._read_next)

    def known(self) -> list[tuple[str, KindMix]]:
        """Returns and forgets what has been found out since the last call."""
        return [self._known.popleft() for _ in range(len(self._known))]

    def drain(self) -> None:
        """Waits until everything that was begun has been read."""
        self._thread.drain()

    def close(self) -> None:
        self._waiting.clear()
        self._thread.close(seconds=1.0)

    def _read_next(self) -> None:
        if not self._waiting or self._has_failed:
            return
        donor_id, tokens = self._waiting.popleft()
        try:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            self._known.append((donor_id, kinds_of(self._tokenizer.decode(tokens.tolist()))))
        except Exception:
            self._has_failed = True
            logger.warning("donors' texts cannot be read; eviction weighs all kinds alike", exc_info=True)


def kind_reader_for(eviction: Eviction, llm_args: Any) -> KindReader | None:
    """A reader where the policy weighs kinds; None where it does not."""
    return KindReader(lambda: tokenizer_of(llm_args)) if eviction.reads_kinds else None


def tokenizer_of(llm_args: Any) -> Any:
    """The engine's tokenizer, special tokens written out: an object that it was given, or one loaded from its files."""
    given = getattr(llm_args, "tokenizer", None)
    if given is not None and hasattr(given, "decode"):
        return given
    return imported("AutoTokenizer").from_pretrained(str(given or llm_args.model))
