"""One policy under one capacity, over a whole trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.donors.eviction import Eviction, eviction_factory
from validation.replay.blocks import NONE
from validation.replay.cache import BlockCache
from validation.replay.optimum import Optimum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from validation.replay.blocks import Blocks
    from validation.replay.trace import Trace

OPTIMUM = "optimum"
EXACT_PREFIX, SPAN = "exact_prefix", "span"


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Which held blocks count. With `as_prefixes` only those behind nothing but held ones, as in a prefix cache.

    Otherwise spans, wherever they stand: runs of held blocks that stood in the same order when they came, of at least
    `min_tokens` tokens, of which the first `recompute_tokens` are computed again. A request's last token is always
    computed.
    """

    name: str
    as_prefixes: bool
    min_tokens: int = 1
    recompute_tokens: int = 0

    def blocks(self, trace: Trace) -> Blocks:
        """The blocks as this rule tells them apart."""
        return trace.prefixes if self.as_prefixes else trace.spans

    def sentence(self) -> str:
        """For a report: what counts."""
        if self.as_prefixes:
            return "What counts is the leading run of held blocks, at no cost but that of a reused token."
        return (
            f"What counts is every run of held blocks, wherever it stands, of at least {self.min_tokens:,} tokens that "
            f"stood in this order when they came; its first {self.recompute_tokens:,} tokens are computed again."
        )

    def reused(self, spans: Iterable[int]) -> int:
        """Tokens that are not computed, given those of each run of held blocks."""
        return sum(max(0, span - self.recompute_tokens) for span in spans if span >= self.min_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """`reused` int64 [requests]: tokens that each request did not compute, in the order of `Trace.requests`.

    `evictions` counts blocks, `regrets` those that were asked for again after they had been evicted.
    """

    rule: str
    policy: str
    capacity_tokens: int
    reused: npt.NDArray[np.int64]
    evictions: int
    regrets: int


@dataclass(slots=True)
class _Now:
    request: int = 0
    seconds: float = 0.0


def simulate(trace: Trace, rule: ReuseRule, policy: str, capacity_tokens: int) -> Outcome:
    """Serves the requests one after the other, each whole before the next; `policy` is an `Eviction` or OPTIMUM."""
    now, blocks = _Now(), rule.blocks(trace)
    looks_ahead = policy == OPTIMUM
    cache = BlockCache(
        blocks,
        Optimum((request for _, request in trace.requests(as_prefixes=rule.as_prefixes)), lambda: now.request)
        if looks_ahead
        else eviction_factory(Eviction(policy), lambda: now.seconds)(),
        capacity_tokens,
        looks_ahead=looks_ahead,
    )
    prompt_tokens = trace.prompt_tokens()
    reused = np.zeros(len(prompt_tokens), dtype=np.int64)
    for index, (seconds, request) in enumerate(trace.requests(as_prefixes=rule.as_prefixes)):
        now.request, now.seconds = index, seconds
        hits = cache.serve(request, seconds)
        reused[index] = min(rule.reused(_spans(request, hits, blocks, cache)), prompt_tokens[index] - 1)
    return Outcome(rule.name, policy, capacity_tokens, reused, cache.evictions, cache.regrets)


def _spans(request: Sequence[int], hits: frozenset[int], blocks: Blocks, cache: BlockCache) -> Iterator[int]:
    """Tokens of each run of held blocks that stood behind each other when they came; a block may be in two runs."""
    span, last = 0, NONE
    for block in request:
        if block not in hits or cache.before[block] != last:
            yield span
            span = 0
        span += blocks.tokens[block] if block in hits else 0
        last = block
    yield span
