"""What a device offers: Triton kernels where they can serve tensors, streams and events.

Streams and events are None on the CPU, where all work is done when a call returns."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

Stream = torch.cuda.Stream
Event = torch.cuda.Event
_FP8_CAPABILITY = (8, 9)
_capability = cache(torch.cuda.get_device_capability)
_HAS_TRITON = find_spec("triton") is not None


def triton_serves(target: torch.Tensor, sources: Iterable[torch.Tensor]) -> bool:
    """Return whether a kernel on `target`'s device can read and write all tensors; their channels must be side by side.

    Triton must be installed. The tensors lie on one CUDA device, or for tests on the CPU with TRITON_INTERPRET=1.
    Sources may also lie in pinned host memory, which a card reads in place."""
    if not (target.is_cuda or (target.is_cpu and os.environ.get("TRITON_INTERPRET") == "1")) or not _HAS_TRITON:
        return False
    if target.is_cuda and target.dtype == torch.float8_e4m3fn and _capability(target.device) < _FP8_CAPABILITY:
        return False
    return target.stride(-1) == 1 and all(
        source.stride(-1) == 1 and (source.device == target.device or (target.is_cuda and source.is_pinned()))
        for source in sources
    )


def launch(kernel: Any, grid: tuple[int, ...], near: torch.Tensor, *arguments: object, **constants: object) -> None:
    """Launch a Triton kernel on the current stream of the device of `near`, or run it in the interpreter."""
    with torch.cuda.device_of(near):
        kernel[grid](*arguments, **constants)


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


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return how long `call` takes, with the work that it queues on the current stream, which is idle before."""
    if (stream := current_stream(device)) is None:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    finish(stream)
    begin, end = Event(enable_timing=True), Event(enable_timing=True)
    begin.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


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
