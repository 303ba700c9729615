"""Says which layers of the running loads are in the pool, to a forward that starts before all of them are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from semblend_trt.streams import Event, Stream, wait

if TYPE_CHECKING:
    from collections.abc import Iterable


class LayerReadiness:
    """The layers that are still on their way, in the order in which they arrive.

    A forward that calls `wait` before every layer, on the stream it runs on, sets `is_awaited`. Where nobody does, and
    wherever no Python runs between the layers (CUDA graphs, compiled layers), `join` makes the whole load precede what
    follows on a stream. The engine's thread alone uses it.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._arriving: deque[tuple[int, Event]] = deque()
        self._arrived_layers = 0

    @property
    def is_arriving(self) -> bool:
        """True while some layers are waited for by nobody yet: what reads them must call `wait` or `join`."""
        return bool(self._arriving)

    def expect(self, groups: Iterable[tuple[int, Event | None]]) -> None:
        """Announces one load. Each group, (end_layer, event), says: layers below `end_layer` are in the pool behind
        `event`. What was announced before must have been joined."""
        self._arrived_layers = 0
        self._arriving.extend((end_layer, event) for end_layer, event in groups if event is not None)

    def wait(self, layer: int, stream: Stream | None) -> None:
        """Queues on `stream` that what follows, which reads or writes `layer`, starts once it is in the pool."""
        while self._arriving and self._arrived_layers <= layer:
            self._arrived_layers, event = self._arriving.popleft()
            wait(stream, [event])

    def join(self, stream: Stream | None) -> None:
        """Queues on `stream` that what follows starts once every layer is in the pool."""
        while self._arriving:
            wait(stream, [self._arriving.popleft()[1]])
