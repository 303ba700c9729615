"""What every bad input has in common: how it is made from a good one, how long it may take, and what came of it."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

# Of no field that anybody reads.
_WRONG: tuple[Any, ...] = (None, True, -1, -1.5, float("inf"), 1 << 70, "", "\ud800", "x" * 70_000, [], [[]], {"x": 1})


class Answer(Enum):
    """What became of an input. TAKEN: it was still a good one, and is none that counts."""

    REFUSED = "refused"
    TAKEN = "taken"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Tried:
    """One input: where it was given, what it was, what became of it, and of a fault how that looked."""

    door: str
    what: str
    answer: Answer
    told: str = ""


class TooLongError(BaseException):
    """An input took longer than it may. No `except Exception` takes it for an error of its own."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TooLongError in the main thread when the block takes longer."""

    def end(*_: object) -> None:
        raise TooLongError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def spoiled_bytes(rng: random.Random, data: bytes) -> bytes:
    """The same with some bytes changed, added, or missing."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
    noise = rng.randbytes(end - start)
    return rng.choice(
        (
            data[:start],
            data[:start] + data[end:],
            data[:start] + noise + data[end:],
            data[:start] + noise + data[start:],
            data[:end] + data[start:],
            data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :],
        )
    )


def spoiled_value(rng: random.Random, value: Any) -> Any:
    """A JSON value with one of its parts in a wrong form, or missing."""
    spoiled = deepcopy(value)
    owner, name = rng.choice(list(_parts(spoiled)))
    if rng.random() < 0.2:
        del owner[name]
    else:
        owner[name] = rng.choice(_WRONG)
    return spoiled


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything inside a value, as its owner and its name or place there; of long lists the first part only."""
    places = list(value.items()) if isinstance(value, dict) else list(enumerate(value[:1]))
    for name, part in places:
        yield value, name
        if isinstance(part, (dict, list)):
            yield from _parts(part)
