"""CUDA streams and events; each is None on the CPU, where all work is done when a call returns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

Stream = torch.cuda.Stream
Event = torch.cuda.Event


def side_stream(device: torch.device) -> Stream | None:
    """Return a new stream on `device`; None on the CPU."""
    return Stream(device) if device.type == "cuda" else None


def current_stream(device: torch.device) -> Stream | None:
    """Return the stream on which torch now queues work for `device`; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on(stream: Stream | None) -> AbstractContextManager[Any]:
    """Make `stream` the current one within a `with` block."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def record(stream: Stream | None) -> Event | None:
    """Return an event after all work queued on `stream` so far."""
    if stream is None:
        return None
    event = Event()
    event.record(stream)
    return event


def finish(stream: Stream | None) -> None:
    """Wait until all work queued on `stream` is done; the thread sleeps, where torch's own wait spins."""
    if stream is not None:
        event = Event(blocking=True)
        event.record(stream)
        event.synchronize()


def wait(stream: Stream | None, events: Iterable[Event | None]) -> None:
    """Have later work on `stream` wait for `events`; the host does not wait."""
    if stream is None:
        return
    for event in events:
        if event is not None:
            stream.wait_event(event)


class HostCopy:
    """A tensor on its way to the host, after the work queued on the current stream so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Queue the copy; the host does not wait."""
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = record(current_stream(tensor.device))

    def read(self) -> npt.NDArray[Any]:
        """Wait for the copy, and for nothing queued after it."""
        if self._copied is not None:
            self._copied.synchronize()
        found: npt.NDArray[Any] = self._host.numpy()
        return found
