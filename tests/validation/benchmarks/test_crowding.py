"""The benchmark of crowds: it asks and counts rightly, and its rows have goals in a whole run only."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.validation.benchmarks.conftest import Server
from tests.validation.benchmarks.dry_runs import dry_rows
from validation.benchmarks import crowding

if TYPE_CHECKING:
    from pathlib import Path


def test_connections_survive_while_good_requests_are_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "CONNECTIONS_A_SECOND", 1e9)
    crowd = crowding.crowded(server, 30)  # type: ignore[arg-type]
    assert (crowd.survived, crowd.requests) == (30, 3)
    monkeypatch.setattr(crowding, "small", lambda number: b" " * (2048 if number > 10 else 1))
    assert crowding.crowded(server, 30).survived == 10  # type: ignore[arg-type]


def test_all_is_sent_until_it_is_told_to_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    ended.set()
    assert crowding.send_all(server.address(), begun, ended) == {429: crowding.SENDERS}
    assert begun.is_set()


def test_a_small_request_that_is_not_served_ends_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowding.p95_ms(server.address(), 3, 0) > 0
    monkeypatch.setattr(crowding, "small", lambda _: b" " * 2048)
    with pytest.raises(RuntimeError, match="3 of 3 small requests were not served: status 429"):
        crowding.p95_ms(server.address(), 3, 0)


def test_a_short_run_is_whole_and_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is a real one: with 256 descriptors it survives 300 half-open connections."""
    monkeypatch.setattr(crowding, "worker", lambda *_, **__: Server())
    rows = dry_rows(crowding, tmp_path, "--connections", "300", "--requests", "2")
    assert set(rows) == {"half_open_connections_survived", "noisy_tenant_slowdown"}
    assert rows["half_open_connections_survived"].value == 300
    assert " x 429" in rows["noisy_tenant_slowdown"].baseline
