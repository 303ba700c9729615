"""A check that breaks tells what it had found, and that it broke."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.doctor.finding import Area, Finding, Status

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_what_ends_a_check_is_a_finding_that_failed() -> None:
    area = Area("engine")

    def check() -> Iterator[Finding]:
        yield area.ok("first")
        raise OSError("libnothing.so: cannot open\nand more")

    first, second = area.collect(check())
    assert (first.status, first.is_problem) == (Status.OK, False)
    assert second == Finding(
        "engine", Status.FAILED, "cannot be checked: OSError: libnothing.so: cannot open", None, {}
    )
    assert second.is_problem
