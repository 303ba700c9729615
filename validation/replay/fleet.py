"""A trace served by a growing fleet: placement by held text, with and without fetches of what another worker holds.

A fetch takes the time of its bytes on the links of both workers, and the rest of a prompt is computed after it. Before
any wait it pays where the bits a second are above 8 x bytes a token x prefilled tokens a second / MARGIN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semblend_trt.config import Eviction
from semblend_trt.donors.eviction import policy_of
from validation.replay.simulation import BlockCache, ReuseRule
from validation.replay.trace import NONE, BlockKind, Trace

# In the middle fifth of the requests, one in three asks about one document instead.
HOT_TOKENS, HOT_QUESTION_TOKENS, HOT_EVERY = 16_384, 512, 3
# A fetch takes at most this share of the time to the first token without it.
MARGIN = 0.9


@dataclass(frozen=True, slots=True)
class Fleet:
    """`first` workers serve a third of the requests, `last` the others. A worker holds `capacity_tokens`, prefills one
    prompt after the other at `tokens_per_s`, and its KV has `token_bytes` a token."""

    first: int
    last: int
    capacity_tokens: int
    tokens_per_s: float
    token_bytes: int


class Served(NamedTuple):
    """By request, int64 [requests]: the prompt's tokens, those that were not computed, and those that were fetched. And
    the seconds to the first token, float64 [requests]."""

    tokens: npt.NDArray[np.int64]
    reused: npt.NDArray[np.int64]
    fetched: npt.NDArray[np.int64]
    ttft: npt.NDArray[np.float64]


@dataclass(slots=True)
class _Worker:
    """`free` and `link`: the seconds at which its prefills and its transfers have ended."""

    cache: BlockCache
    free: float = 0.0
    link: float = 0.0


class _Way(NamedTuple):
    """How a worker would serve a prompt: `fetched` tokens come from `source`, and the first token at `ttft`."""

    ttft: float
    worker: _Worker
    reused: int
    fetched: int = 0
    fetched_at: float = 0.0
    source: _Worker | None = None


def serve_fleet(trace: Trace, rule: ReuseRule, fleet: Fleet, gbits: float = 0.0) -> Served:
    """Serve all requests, each where its first token comes first; workers fetch at `gbits` Gb/s, not at all at 0."""
    blocks = rule.blocks(trace)
    hot = blocks.number(("hot document",), HOT_TOKENS, BlockKind.RETRIEVED_CONTEXT)
    workers = [_Worker(BlockCache(blocks, policy_of(Eviction.LRU), fleet.capacity_tokens)) for _ in range(fleet.last)]
    served = list[tuple[int, int, int, float]]()
    for index, (seconds, request, tokens) in enumerate(trace.requests(as_prefixes=rule.as_prefixes)):
        if 2 * len(trace) <= 5 * index < 3 * len(trace) and index % HOT_EVERY == 0:
            request, tokens = [hot, NONE], HOT_TOKENS + HOT_QUESTION_TOKENS
        active = workers[: fleet.first if 3 * index < len(trace) else fleet.last]
        held = [rule.reused(request, each.cache.held(request), each.cache, tokens) for each in active]
        most = max(zip(active, held, strict=True), key=lambda each: each[1])
        ways = [
            _way(worker, own, seconds, tokens, fleet, gbits, most) for worker, own in zip(active, held, strict=True)
        ]
        best = min(ways, key=lambda way: (way.ttft, way.worker.free))
        best.worker.free = best.ttft
        if best.source is not None:
            best.worker.link = best.source.link = best.fetched_at
        best.worker.cache.serve(request, seconds)
        served.append((tokens, best.reused, best.fetched, best.ttft - seconds))
    return Served(*map(np.array, zip(*served, strict=True)))


def _way(
    worker: _Worker, own: int, seconds: float, tokens: int, fleet: Fleet, gbits: float, most: tuple[_Worker, int]
) -> _Way:
    """Return the faster of what a worker can do: compute all that it does not hold, or fetch from who holds most."""
    begin = max(seconds, worker.free)
    alone = _Way(begin + (tokens - own) / fleet.tokens_per_s, worker, own)
    source, theirs = most
    if not gbits or theirs <= own:
        return alone
    ready = max(seconds, worker.link, source.link) + (theirs - own) * fleet.token_bytes * 8e-9 / gbits
    ttft = max(begin, ready) + (tokens - theirs) / fleet.tokens_per_s
    if ttft - begin > MARGIN * (alone.ttft - begin):
        return alone
    return _Way(ttft, worker, theirs, theirs - own, ready, source)
