"""Where the time to the first token goes: look-up, move, forward, and the rest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Stopwatch:
    """Times parts of one engine: on the card where one runs there, between events that wait for nothing.

    `lookup` is the host's time in the connector's look-up; `move` and `forward` run from the stream reaching the part
    to the stream having done it.
    """

    def __init__(self, llm: Any) -> None:
        executor = llm.executor
        self._cuda = executor.model_runner.device.type == "cuda"
        self._marks: dict[str, list[Any]] = {}
        self._wrapped: list[tuple[Any, str]] = []
        self._wrap(executor.connector, "get_num_new_matched_tokens", "lookup", on_card=False)
        self._wrap(executor.connector, "start_load_kv", "move", on_card=self._cuda)
        self._wrap(executor.model_runner, "forward", "forward", on_card=self._cuda)

    def read(self, ttft_ms: float) -> dict[str, float]:
        """Milliseconds of each part of the request that has ended, and of the rest."""
        if self._cuda:
            torch.cuda.synchronize()
        parts = {name: between(*marks) for name, marks in self._marks.items()}
        self._marks.clear()
        return parts | {"rest": ttft_ms - sum(parts.values())}

    def remove(self) -> None:
        """Leaves the engine as it was."""
        for owner, name in self._wrapped:
            delattr(owner, name)

    def _wrap(self, owner: Any, name: str, part: str, *, on_card: bool) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = mark(on_card)
            result = original(*arguments, **options)
            self._marks.setdefault(part, [begin, mark(on_card)])
            return result

        setattr(owner, name, timed)
        self._wrapped.append((owner, name))


def mark(on_card: bool) -> Any:
    """This moment: on the card's current stream, or on the host."""
    if not on_card:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Milliseconds between two marks of one kind; the card's must have passed."""
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))
