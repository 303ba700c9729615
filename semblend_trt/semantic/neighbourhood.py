"""Keeps the semantic neighbours in step with the scheduler's donors and requests, and says what was found."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.announcer import DonorPublisher
from semblend_trt.semantic.embedder import Embedder, EmbedderKind, embedder_for
from semblend_trt.semantic.neighbours import Neighbours

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.audit import AuditEvents
    from semblend_trt.config import Settings
    from semblend_trt.connector.requests import TrackedRequest
    from semblend_trt.metrics import Metrics
    from semblend_trt.namespace import CacheNamespace
    from semblend_trt.outcome import ReuseReport
    from semblend_trt.semantic.neighbours import Neighbour

# The scheduler takes them at every iteration; while it runs none, the newest are kept.
_MOST_NEAR = 64


class Neighbourhood(DonorPublisher):
    """Hears the donor index's news of donors in front of `news`, which hears them too.

    Without `neighbours` it only passes the news on. All methods but `report` belong to the scheduler's thread. `near`
    are donors that were found near requests and that `near_donors` has not named yet.
    """

    def __init__(self, neighbours: Neighbours | None, news: DonorPublisher, near: deque[str]) -> None:
        self._neighbours, self._news, self._near = neighbours, news, near
        self._key_of_donor: dict[str, str] = {}

    @property
    def neighbours(self) -> Neighbours | None:
        return self._neighbours

    def look_up(self, tracked: TrackedRequest) -> None:
        """Has the nearest donors of the request found."""
        if self._neighbours is not None:
            self._neighbours.look_up(tracked.request_id, tracked.namespace_key, tracked.prompt)

    def near_donors(self) -> list[str]:
        """Donors near the requests whose neighbours were found since the last call, the nearest of each first."""
        return [self._near.popleft() for _ in range(len(self._near))]

    def report(self, request_id: int, report: ReuseReport) -> ReuseReport:
        """The report with the nearest donors that are known by now."""
        return report if self._neighbours is None else replace(report, nearest=self._neighbours.nearest(request_id))

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        self._key_of_donor[donor_id] = namespace.key
        self._news.intended(donor_id, namespace, salt)

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        namespace_key = self._key_of_donor.pop(donor_id, None)
        self._news.held(donor_id, tokens, tier)
        if self._neighbours is not None and namespace_key is not None:
            self._neighbours.donor_held(namespace_key, donor_id, tokens)

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        self._news.found(donor_id, namespace_key, tokens, tier)
        if self._neighbours is not None:
            self._neighbours.donor_held(namespace_key, donor_id, tokens)

    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        self._news.embedded(donor_id, vector)

    def moved(self, donor_id: str, tier: str) -> None:
        self._news.moved(donor_id, tier)

    def gone(self, donor_id: str) -> None:
        self._key_of_donor.pop(donor_id, None)
        if self._neighbours is not None:
            self._neighbours.donor_gone(donor_id)
        self._news.gone(donor_id)

    def close(self) -> None:
        if self._neighbours is not None:
            self._neighbours.close()
        self._news.close()


class _Records:
    """Writes what the neighbours' thread found to the audit log, counts it, and tells the fleet of vectors."""

    def __init__(self, audit: AuditEvents, metrics: Metrics, news: DonorPublisher) -> None:
        self._audit, self._metrics, self._news = audit, metrics, news
        self.near: deque[str] = deque(maxlen=_MOST_NEAR)

    def neighbours_found(self, request_id: int, nearest: tuple[Neighbour, ...]) -> None:
        self._audit.neighbours(request_id, nearest)
        self._metrics.neighbours_found(nearest)
        self.near.extend(each.donor_id for each in nearest)

    def donor_embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        self._news.embedded(donor_id, vector)

    def neighbours_counted(self, event: str) -> None:
        self._metrics.neighbours_counted(event)


def neighbourhood_for(
    settings: Settings,
    refusal: str | None,
    tokenizer_folder: Callable[[], Path | None],
    audit: AuditEvents,
    metrics: Metrics,
    news: DonorPublisher,
) -> Neighbourhood:
    """The neighbourhood that the settings ask for: none without an embedder, or where `refusal` stands for ever.

    `tokenizer_folder` is asked once, on the neighbours' thread.
    """
    if settings.embedder is EmbedderKind.OFF or not settings.enabled or refusal is not None:
        return Neighbourhood(None, news, deque())

    def open_embedder() -> Embedder:
        return embedder_for(settings.embedder, settings.embedder_model)

    def open_decoder() -> Callable[[npt.NDArray[np.int32]], str]:
        folder = tokenizer_folder()
        if folder is None:
            raise ConfigurationError("the engine's tokenizer is not among the files on this machine")
        return text_decoder(folder)

    records = _Records(audit, metrics, news)
    neighbours = Neighbours(open_embedder, open_decoder, records, min_similarity=settings.min_similarity)
    return Neighbourhood(neighbours, news, records.near)


def text_decoder(folder: Path) -> Callable[[npt.NDArray[np.int32]], str]:
    """A function from token ids int32 [n] to text without special tokens, for the tokenizer in a model's folder.

    It leaves the interpreter's lock while it decodes. Raises ConfigurationError without a tokenizer.json that can be
    read.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigurationError(f"the tokenizer {path} cannot be read: {error}") from error

    def decode(tokens: npt.NDArray[np.int32]) -> str:
        # decode() keeps the lock, decode_batch() does not.
        (text,) = tokenizer.decode_batch([tokens.tolist()], skip_special_tokens=True)
        return str(text)

    return decode
