"""Serves prompts one after the other as an engine with a prefix cache and our donors would, without a model.

The prefix cache is the embedded engine's block manager; the look-up, the donors and their tiers are the connector's.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from engine_wrapper.embedded.block_manager import BlockManager, RootKey
from engine_wrapper.embedded.llm_args import KvCacheConfig
from semblend_trt.connector.lookup import DonorPlanner
from semblend_trt.connector.requests import TrackedRequest
from semblend_trt.discovery.planner import LookupRequest
from semblend_trt.donors.donor_index import DonorIndex
from semblend_trt.donors.offload import OffloadEvent, OffloadEventKind, SavedDonor
from semblend_trt.plan import EngineMode, PlanKind

if TYPE_CHECKING:
    from semblend_trt.config import Settings
    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.donors.catalog import CatalogStats
    from semblend_trt.plan import PlanSpan, SemanticKvPlan
    from semblend_trt.pool_facts import PoolFacts
    from semblend_trt.reuse_profile import ReuseProfile


def donor_name(line: int, number: int) -> str:
    """The donor that the prompt of this number, in this line of a log, leaves."""
    return f"{line}:{number}"


def line_of(donor_id: str) -> int:
    """The line of a log that a donor comes from."""
    return int(donor_id.partition(":")[0])


class Served(NamedTuple):
    """What became of one prompt of `tokens` tokens.

    `prefix_alone` tokens come from a prefix cache without our donors; with them, `prefix` from the prefix cache and
    `spans` from donors, or `reason` says why none do.
    """

    tokens: int
    prefix_alone: int
    prefix: int
    spans: tuple[PlanSpan, ...]
    reason: str | None


class _PrefixCache:
    """An engine's exact prefix cache, for one request at a time."""

    def __init__(self, pool: PoolFacts) -> None:
        config = KvCacheConfig(tokens_per_block=pool.geometry.block_size)
        self._blocks = BlockManager(pool.num_blocks, config, lambda _source, _target: None)

    def begin(self, namespace: str, tokens: tuple[int, ...]) -> int | None:
        """Tokens of the prompt's prefix that are held; None for a prompt that does not fit into the pool."""
        key = RootKey(cache_salt=namespace)
        match = self._blocks.match(key, tokens)
        if not self._blocks.fits(match, len(tokens)):
            return None
        held = self._blocks.add_sequence(0, key, match, len(tokens))
        self._blocks.allocate(0, len(tokens))
        return held

    def end(self, exact_tokens: tuple[int, ...]) -> None:
        """Ends the request; its blocks of these leading tokens, whose KV a cold run would produce, are held."""
        self._blocks.publish(0, exact_tokens)
        self._blocks.release(0)


class Serving:
    """An engine's caches and donors over a sequence of prompts, each served whole before the next. Not thread safe."""

    def __init__(self, settings: Settings, pool: PoolFacts, profile: ReuseProfile | None = None) -> None:
        """With a `profile` the settings' policy must be verified; every check then passes."""
        self._pool, self._profile = pool, profile
        self._alone, self._prefixes = _PrefixCache(pool), _PrefixCache(pool)
        self._donors = DonorIndex(settings, pool, (), None, lambda _kind: None)
        self._planner = DonorPlanner(settings, pool, self._donors)
        self._served = 0

    def serve(self, line: int, namespace: str, tokens: TokenArray) -> Served:
        """Serves one prompt (int32 [n], n >= 1), which stands in line `line`."""
        self._served += 1
        held = tuple(tokens.tolist())  # its slices are the keys of blocks, without a copy
        alone = self._alone.begin(namespace, held)
        prefix = self._prefixes.begin(namespace, held)
        if alone is None or prefix is None:
            return Served(len(held), 0, 0, (), "longer_than_pool")
        self._alone.end(held)
        tracked = TrackedRequest(self._served, namespace, tokens, prefix)
        plan, reason = self._look_up(tracked)
        tracked.release_leases()
        self._save(donor_name(line, self._served), tracked)
        self._prefixes.end(held if plan is None else held[: plan.exact_token_count])
        self._answer_tiers()
        spans = () if plan is None or plan.kind is PlanKind.DISCOVERY_ONLY else plan.spans
        return Served(len(held), alone, prefix, spans, reason)

    def stats(self) -> CatalogStats:
        """The donors held now, and the bytes that they take."""
        return self._donors.catalog.stats()

    def _look_up(self, tracked: TrackedRequest) -> tuple[SemanticKvPlan | None, str | None]:
        planned, tracked.leases = self._planner.plan(
            LookupRequest(
                request_id=tracked.request_id,
                namespace_key=tracked.namespace_key,
                tokens=tracked.prompt,
                num_computed_tokens=tracked.num_computed_tokens,
                block_size=self._pool.geometry.block_size,
                mode=EngineMode.WRAPPER,
                publication_guard=True,
                profile=self._profile,
            )
        )
        tracked.plan = planned.plan
        return planned.plan, planned.outcome_reason if planned.plan is None else None

    def _save(self, donor_id: str, tracked: TrackedRequest) -> None:
        """What the connector does between a request's look-up and its end, where every save succeeds."""
        generations = 0 if self._profile is None else self._profile.generations
        intent = self._planner.intend(donor_id, tracked, 0, generations)
        if intent is None:
            return
        tokens = tracked.prompt[: intent.max_tokens]
        if self._donors.begin_save(intent, tracked.namespace_key, tokens, (), intent.generation):
            self._donors.saved(SavedDonor(donor_id, len(tokens)))

    def _answer_tiers(self) -> None:
        """Has the tiers do at once what they are told; there is no disk tier."""
        promoted = self._donors.offload.take_commands().promotions
        self._donors.take_events(deque(OffloadEvent(OffloadEventKind.PROMOTED, each) for each in promoted))
