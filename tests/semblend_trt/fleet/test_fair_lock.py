"""Who waits gets a fair lock before who asks again at once."""

from __future__ import annotations

import threading

import pytest

from semblend_trt.fleet.fair_lock import FairLock


def test_who_waits_is_next() -> None:
    for _ in range(50):
        lock, order = FairLock(), []

        def wait(lock=lock, order=order) -> None:
            with lock:
                order.append("waited")

        thread = threading.Thread(target=wait)
        with lock:
            thread.start()
            while not lock._turn.locked():
                pass
        with lock:
            order.append("asked again")
        thread.join()
        assert order == ["waited", "asked again"]


def test_an_error_gives_it_back() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    with lock:
        assert lock._lock.locked()
