"""Traces and files that several tests of the replay build."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from semblend_trt.fleet.telemetry import TraceBlock, TraceLine
from validation import results
from validation.replay.latency import H200_PROFILE, recorded_observations
from validation.replay.trace import trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from validation.replay.trace import Trace
    from validation.results import Measured


def make_line(
    index: int, contents: Sequence[str | None], tokens: Sequence[int], tenant: str | None = None, **fields: object
) -> TraceLine:
    blocks = [TraceBlock(content_hash=c, token_count=n) for c, n in zip(contents, tokens, strict=True)]
    return TraceLine.model_validate(
        {"request_id": f"r{index}", "timestamp_ms": 1_000.0 * index, "tenant_id": tenant, "blocks": blocks} | fields
    )


@pytest.fixture(scope="session")
def line() -> Callable[..., TraceLine]:
    """Makes a line: its number, which is also its second, the blocks' contents and their tokens."""
    return make_line


@pytest.fixture(scope="session")
def trace_from() -> Callable[[Sequence[Sequence[str]], dict[str, int]], Trace]:
    """Makes a trace of requests, each a sequence of contents, given the tokens of each content."""

    def make(requests: Sequence[Sequence[str]], tokens: dict[str, int]) -> Trace:
        return trace_of(make_line(i, names, [tokens[name] for name in names]) for i, names in enumerate(requests))

    return make


@pytest.fixture
def recorded_rows(tmp_path: Path, measured: Measured) -> Path:
    """The times that ship with the package, as the rows of a benchmark."""
    rows = []
    for each in recorded_observations(H200_PROFILE):
        kind = "verified" if each.is_checked else "shifted" if each.reused else "cold"
        name = f"{kind}_ttft_{each.computed + each.reused}_ms"
        baseline = f"{each.reused} tokens reused, {each.computed} computed"
        rows.append(results.row(name, each.ttft_ms, "ms", baseline=baseline, measured=measured))
    results.write_rows(tmp_path / "ttft.json", rows)
    return tmp_path / "ttft.json"
