"""Traces and files that several tests of the replay build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from semblend_trt.fleet.telemetry import TraceBlock, TraceLine
from validation.replay.trace import trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from validation.replay.trace import Trace

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.fixture(scope="session")
def recorded_rows() -> Path:
    """Result rows that a benchmark recorded."""
    return ROOT / "benchmarks/results/h200/ttft.json"
