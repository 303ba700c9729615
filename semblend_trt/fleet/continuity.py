"""Which events of a worker follow each other: what a reader may believe, and when it has to ask for everything anew."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.fleet.events import ProviderGenerationReset

if TYPE_CHECKING:
    from semblend_trt.fleet.events import SemanticKvEvent

Stream = tuple[int, int]
MAX_STREAMS = 4096


class Verdict(str, Enum):
    """What an event is to a reader that saw all before it."""

    RESET = "reset"  # forget the stream's donors; what follows is everything
    NEXT = "next"  # follows what was seen since the reset: apply it
    UNSYNCED = "unsynced"  # follows the one before, but something was missed earlier
    GAP = "gap"  # something was missed just before it: ask for a resync
    DUPLICATE = "duplicate"  # seen, or overtaken: leave it
    STALE = "stale"  # of an earlier generation: leave it
    REFUSED = "refused"  # of one stream more than are followed: leave it

    @property
    def is_to_apply(self) -> bool:
        """True when the event says something that is not known yet."""
        return self in (Verdict.RESET, Verdict.NEXT, Verdict.UNSYNCED, Verdict.GAP)


@dataclass(slots=True)
class _Position:
    generation: int
    last_id: int
    is_synced: bool


class Continuity:
    """Follows every (worker, rank). Generations only rise until a stream is forgotten. Not thread safe."""

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self._max_streams = max_streams
        self._positions: dict[Stream, _Position] = {}

    def observe(self, event: SemanticKvEvent) -> Verdict:
        """Places one event behind those that were observed before."""
        stream = (event.worker_id, event.dp_rank)
        position = self._positions.get(stream)
        generation = event.generation
        if generation is None:  # of an unknown kind that names none
            generation = 0 if position is None else position.generation
        if position is None and len(self._positions) >= self._max_streams:
            return Verdict.REFUSED
        if position is not None and generation < position.generation:
            return Verdict.STALE
        if position is not None and generation == position.generation and event.event_id <= position.last_id:
            return Verdict.DUPLICATE
        if isinstance(event.data, ProviderGenerationReset):
            self._positions[stream] = _Position(generation, event.event_id, is_synced=True)
            return Verdict.RESET
        if position is None or generation > position.generation:
            self._positions[stream] = _Position(generation, event.event_id, is_synced=False)
            return Verdict.GAP
        follows = event.event_id == position.last_id + 1
        position.last_id = event.event_id
        position.is_synced &= follows
        if not follows:
            return Verdict.GAP
        return Verdict.NEXT if position.is_synced else Verdict.UNSYNCED

    def is_synced(self, stream: Stream) -> bool:
        """True when nothing of the stream was missed since its reset."""
        position = self._positions.get(stream)
        return position is not None and position.is_synced

    def generation(self, stream: Stream) -> int | None:
        """The stream's generation; None for one that is not followed."""
        position = self._positions.get(stream)
        return None if position is None else position.generation

    def distrust(self, stream: Stream) -> None:
        """Counts the stream as unsynced until its next reset."""
        if stream in self._positions:
            self._positions[stream].is_synced = False

    def forget(self, stream: Stream) -> None:
        """Lets a silent stream go; whichever generation speaks next is believed."""
        self._positions.pop(stream, None)
