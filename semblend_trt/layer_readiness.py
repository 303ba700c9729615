"""Says which layers of the running loads are in the pool, to a forward that starts before all of them are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from semblend_trt.streams import Event, Stream, wait

if TYPE_CHECKING:
    from collections.abc import Iterable


class LayerReadiness:
    """The layers that are still on their way, in the order in which they arrive.

    A forward that calls `wait` before every layer sets `is_awaited`. Where nobody does, and wherever no Python runs
    between the layers (CUDA graphs, compiled layers), `join` makes the whole load precede what follows on a stream.
    The engine's thread alone uses it.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._arriving: deque[tuple[int, Event]] = deque()

    def expect(self, groups: Iterable[tuple[int, Event | None]]) -> None:
        """Each group, (end_layer, event), says: layers below `end_layer` are in the pool behind `event`."""
        self._arriving.extend((end_layer, event) for end_layer, event in groups if event is not None)

    def wait(self, layer: int, stream: Stream | None) -> None:
        """Queues on `stream` that what follows, which reads `layer`, starts once that layer is in the pool."""
        first_missing = 0
        while self._arriving and first_missing <= layer:
            first_missing, event = self._arriving.popleft()
            wait(stream, [event])

    def join(self, stream: Stream | None) -> None:
        """Queues on `stream` that what follows starts once every layer is in the pool."""
        while self._arriving:
            wait(stream, [self._arriving.popleft()[1]])
