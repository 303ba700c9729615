"""Traces and files that several tests of the replay build."""

import numpy as np
import pytest

from semblend_trt.fleet.telemetry import TraceBlock, TraceLine
from validation.replay.trace import trace_of


def make_line(index, contents, tokens, tenant=None, **fields):
    blocks = [TraceBlock(content_hash=c, token_count=n) for c, n in zip(contents, tokens, strict=True)]
    return TraceLine.model_validate(
        {"request_id": f"r{index}", "timestamp_ms": 1_000.0 * index, "tenant_id": tenant, "blocks": blocks} | fields
    )


@pytest.fixture(scope="session")
def line():
    """Makes a line: its number, which is also its second, the blocks' contents and their tokens."""
    return make_line


@pytest.fixture(scope="session")
def trace_from():
    """Makes a trace of requests, each a sequence of contents, given the tokens of each content."""

    def make(requests, tokens):
        return trace_of(make_line(i, names, [tokens[name] for name in names]) for i, names in enumerate(requests))

    return make


@pytest.fixture(scope="session")
def corpus():
    """Makes a trace of N prompts, each of a header, four documents of a corpus in any order, and its question."""

    def make(requests):
        random, tokens = np.random.default_rng(3), np.random.default_rng(4).integers(400, 800, 64)
        shares = 1.0 / np.arange(1, 65)
        drawn = [random.choice(64, 4, replace=False, p=shares / shares.sum()) for _ in range(requests)]
        return trace_of(
            make_line(i, ["header", *map(str, each), f"question {i}"], [300, *map(int, tokens[each]), 60])
            for i, each in enumerate(drawn)
        )

    return make


@pytest.fixture(scope="session")
def conversations():
    """Makes a trace of N turns of eight live conversations, each of which ends after 20 turns."""

    def make(requests):
        random = np.random.default_rng(5)
        live, begun, lines = dict[int, list[str]](), 0, []
        for index in range(requests):
            while len(live) < 8:
                begun += 1
                live[begun] = ["header", f"page {begun}"]
            number = int(random.choice(list(live)))
            live[number].append(f"turn {number} {index}")
            lines.append(make_line(index, live[number], [900, 500, *[300] * (len(live[number]) - 2)]))
            if len(live[number]) == 22:
                del live[number]
        return trace_of(lines)

    return make
