"""CUDA streams and events; each is None on the CPU, where all work is done when a call returns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

Stream = torch.cuda.Stream
Event = torch.cuda.Event


def side_stream(device: torch.device) -> Stream | None:
    """A stream of its own on `device`; None on the CPU."""
    return Stream(device) if device.type == "cuda" else None


def current_stream(device: torch.device) -> Stream | None:
    """The stream on which torch queues work for `device` now; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on(stream: Stream | None) -> AbstractContextManager[Any]:
    """Makes `stream` the current one within a `with` block."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def record(stream: Stream | None) -> Event | None:
    """An event behind everything that is queued on `stream` so far."""
    if stream is None:
        return None
    event = Event()
    event.record(stream)
    return event


def finish(stream: Stream | None) -> None:
    """Waits until all that is queued on `stream` is done; the thread sleeps meanwhile, where torch's own wait spins."""
    if stream is not None:
        event = Event(blocking=True)
        event.record(stream)
        event.synchronize()


def wait(stream: Stream | None, events: Iterable[Event | None]) -> None:
    """Queues on `stream` that nothing later starts before `events`; the host does not wait."""
    if stream is None:
        return
    for event in events:
        if event is not None:
            stream.wait_event(event)
