"""Gaps, repetitions, restarts and strangers in a worker's stream of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet.continuity import Continuity, Verdict
from semblend_trt.fleet.observer import FleetObserver
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter, decode

STREAM = (1, 0)


def writer(generation: int = 5, worker: int = 1) -> EventWriter:
    return EventWriter(Emitter(worker, 0, generation), EventFormat.JSON)


def verdicts(continuity: Continuity, payloads) -> list[Verdict]:
    return [continuity.observe(decode(payload)) for payload in payloads]


def test_events_that_follow_a_reset_are_next() -> None:
    speaks, continuity = writer(), Continuity()
    assert verdicts(continuity, [speaks.reset(), speaks.evicted("a"), speaks.evicted("b")]) == [
        Verdict.RESET,
        Verdict.NEXT,
        Verdict.NEXT,
    ]
    assert continuity.is_synced(STREAM)


def test_a_missing_event_is_a_gap_until_the_next_reset() -> None:
    speaks, continuity = writer(), Continuity()
    first, lost, *rest = speaks.reset(), speaks.evicted("a"), speaks.evicted("b"), speaks.evicted("c"), speaks.reset()
    assert verdicts(continuity, [first, *rest]) == [Verdict.RESET, Verdict.GAP, Verdict.UNSYNCED, Verdict.RESET]
    assert verdicts(continuity, [lost, first]) == [Verdict.DUPLICATE, Verdict.DUPLICATE]
    assert continuity.is_synced(STREAM)


def test_a_reader_that_comes_late_knows_it() -> None:
    speaks, continuity = writer(), Continuity()
    speaks.reset()
    assert verdicts(continuity, [speaks.evicted("a"), speaks.evicted("b")]) == [Verdict.GAP, Verdict.UNSYNCED]
    assert not continuity.is_synced(STREAM)


def test_a_restart_is_believed_and_the_old_process_no_longer() -> None:
    old, fresh, continuity = writer(5), writer(6), Continuity()
    payloads = [old.reset(), fresh.reset(), old.evicted("a"), old.reset(), fresh.evicted("b")]
    assert verdicts(continuity, payloads) == [
        Verdict.RESET,
        Verdict.RESET,
        Verdict.STALE,
        Verdict.STALE,
        Verdict.NEXT,
    ]
    continuity.forget(STREAM)
    assert verdicts(continuity, [old.reset()]) == [Verdict.RESET]
    assert continuity.generation(STREAM) == 5


def test_workers_do_not_mix_and_are_bounded() -> None:
    continuity = Continuity(max_streams=2)
    found = verdicts(continuity, [writer(worker=number).reset() for number in (1, 2, 3, 1)])
    assert found == [Verdict.RESET, Verdict.RESET, Verdict.REFUSED, Verdict.DUPLICATE]
    assert [continuity.generation((number, 0)) for number in (1, 2, 3)] == [5, 5, None]


def test_an_event_of_an_unknown_kind_uses_its_id() -> None:
    speaks, continuity = writer(), Continuity()
    continuity.observe(decode(speaks.reset()))
    unknown = b'{"schema_version":1,"event_id":2,"worker_id":1,"dp_rank":0,"data":{"kind":"novel"}}'
    assert continuity.observe(decode(unknown)) is Verdict.NEXT


@given(st.lists(st.integers(0, 11), max_size=30))
def test_who_is_synced_saw_everything_in_order(order) -> None:
    speaks, continuity = writer(), Continuity()
    payloads = [speaks.reset() if number % 6 == 0 else speaks.evicted(str(number)) for number in range(12)]
    applied: list[int] = []
    for index in order:
        verdict = continuity.observe(decode(payloads[index]))
        if verdict is Verdict.RESET:
            applied = [index]
        elif verdict.is_to_apply:
            applied.append(index)
        if continuity.is_synced(STREAM):
            assert applied == list(range(applied[0], applied[-1] + 1))
            assert applied[0] % 6 == 0


def test_an_observer_tells_what_is_wrong() -> None:
    speaks, observer = writer(), FleetObserver()
    first = speaks.reset()
    for payload in (first, first, b"garbage", speaks.evicted("never there"), speaks.heartbeat(1.0, 5, 5)):
        observer.observe(payload)
    speaks.reset()
    observer.observe(speaks.evicted("a"))
    observer.observe(writer(generation=1).reset())
    assert observer.problem_counts == {
        "duplicate": 1,
        "malformed": 1,
        "unknown_donor": 1,
        "state": 1,
        "gap": 1,
        "stale": 1,
    }
