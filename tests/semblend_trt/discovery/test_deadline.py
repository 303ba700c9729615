"""A deadline is over when the clock has passed it, and counts this thread's work only."""

from __future__ import annotations

import threading

from semblend_trt.discovery.deadline import Deadline


def test_it_is_over_behind_its_end_and_not_at_it() -> None:
    times = iter([10.0, 10.0, 10.005, 10.0051])
    deadline = Deadline(5.0, clock=lambda: next(times))
    assert [deadline.is_over for _ in range(3)] == [False, False, True]


def test_work_ends_it() -> None:
    deadline = Deadline(0.001)
    sum(range(10_000))
    assert deadline.is_over


def test_another_threads_work_does_not() -> None:
    deadline = Deadline(10_000)
    other = threading.Thread(target=lambda: sum(range(100_000)))
    other.start()
    other.join()
    assert not deadline.is_over
