"""Bad events: spoiled and forged messages, for the decoder, the observer and the directory."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from semblend_trt.benchmarks.fleet_server import NAMESPACE
from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.observer import FleetObserver
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.fleet.wire import Announcement, Emitter, EventFormat, EventWriter, state_digest, token_digest
from validation.benchmarks.spoiling import Answer, TooLongError, Tried, spoiled_bytes, spoiled_value, within

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 20.0
_WORKER, _GENERATION, _DONOR = (1, 0), 7, "donor"
_TIER = "host"


class Readers:
    """An observer and a directory that both follow one worker with one donor."""

    def __init__(self) -> None:
        self.observer, self.directory = FleetObserver(), Directory(max_donors=16)
        for payload in messages(EventFormat.JSON)[:2]:
            self.observer.observe(payload)
            self.directory.observe(payload)

    def give(self, payload: bytes, sender: str | None) -> tuple[bool, str]:
        """Whether both have counted the message as bad, and what is wrong with how they took it."""
        applied = sum(self.directory.counts[verdict] for verdict in ("reset", "next", "gap", "unsynced"))
        problems = self.observer.problem_counts.total()
        counted = self.directory.counts.total()
        self.observer.observe(payload, sender)
        self.directory.observe(payload, sender)
        applied -= sum(self.directory.counts[verdict] for verdict in ("reset", "next", "gap", "unsynced"))
        if applied or self.observer.problem_counts.total() == problems:
            return False, ""
        wrong = "" if self.directory.counts.total() > counted else "the directory did not count it"
        held = self.directory.donors_of(_WORKER), list(self.observer.workers[_WORKER].donors)
        if held != ({_DONOR: _TIER}, [_DONOR]):
            wrong = f"it was counted as bad, and changed what is held to {held}"
        return True, wrong


def messages(form: EventFormat, worker: tuple[int, int] = _WORKER, generation: int = _GENERATION) -> list[bytes]:
    """One good message of each kind, in an order in which they follow one another."""
    writer = EventWriter(Emitter(*worker, generation), form)
    namespace = NAMESPACE.for_request(None, None)
    tokens = np.arange(256, dtype=np.int32)
    sketch = sketch_of(tokens, sketch_key(namespace.key, None)).to_bytes()
    donor = Announcement(_DONOR, namespace, _TIER, len(tokens), token_digest(tokens), sketch)
    return [
        writer.reset(),
        writer.registered(donor),
        writer.heartbeat(10.0, 1, state_digest([(_DONOR, _TIER)])),
        writer.relocated(_DONOR, "device"),
        writer.evicted(_DONOR),
        writer.purged(),
    ]


def tries(spoiled: int, forged: int) -> Iterator[Tried]:
    """Gives so many spoiled and so many forged messages, each to readers of its own."""
    rng = random.Random(0)
    for number in range(spoiled):
        form = rng.choice(list(EventFormat))
        payload = rng.choice(messages(form))
        if rng.random() < 0.5:
            payload = spoiled_bytes(rng, payload)
        elif form is EventFormat.JSON:
            payload = json.dumps(spoiled_value(rng, json.loads(payload))).encode()
        else:
            payload = _packed(spoiled_value(rng, msgspec.msgpack.decode(payload)))
        yield _tried(f"spoiled {form.value} {number}", payload, None)
    for number in range(forged):
        form, kind = rng.choice(list(EventFormat)), rng.randrange(6)
        what, worker, generation, sender = rng.choice(
            (
                ("of another worker", _WORKER, 8, "2"),
                ("repeated", _WORKER, _GENERATION, "1"),
                ("of an earlier generation", _WORKER, 3, "1"),
                ("of a worker without a number", _WORKER, 8, ">"),
            )
        )
        # What was not said yet is no repetition.
        kind = kind % 2 if what == "repeated" else kind
        yield _tried(f"{what}, {form.value} {number}", messages(form, worker, generation)[kind], sender, is_bad=True)


def _packed(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):  # MessagePack has no such value; as JSON it can be said
        return json.dumps(value, default=list).encode()


def _tried(what: str, payload: bytes, sender: str | None, is_bad: bool = False) -> Tried:
    readers = Readers()
    try:
        with within(PATIENCE):
            is_refused, wrong = readers.give(payload, sender)
    except (Exception, TooLongError) as error:
        return Tried("events", what, Answer.FAULT, f"{error!r} of {payload[:200]!r}")
    if wrong or (is_bad and not is_refused):
        return Tried("events", what, Answer.FAULT, (wrong or "it was believed") + f": {payload[:200]!r}")
    return Tried("events", what, Answer.REFUSED if is_refused else Answer.TAKEN)
