"""Calls of an engine that are watched do what they did."""

from __future__ import annotations

import pytest

from engine_wrapper.watched_call import WatchedCall


class Owner:
    def double(self, number: int, *, fails: bool = False) -> int:
        if fails:
            raise ValueError("it fails")
        return 2 * number


def test_the_result_and_the_error_are_the_owners_and_both_are_noticed() -> None:
    owner, seen = Owner(), []
    watched = WatchedCall(owner, "double", lambda *found: seen.append(found))
    assert owner.double(4) == 8
    with pytest.raises(ValueError, match="it fails"):
        owner.double(5, fails=True)
    assert seen == [(8, 4), (None, 5)]
    watched.remove()
    assert owner.double(6) == 12
    assert len(seen) == 2
    assert not vars(owner)


def test_an_owner_without_the_method_is_refused() -> None:
    with pytest.raises(AttributeError, match="triple"):
        WatchedCall(Owner(), "triple", print)
