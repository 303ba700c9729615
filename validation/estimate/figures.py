"""Serves prompts as an engine with a prefix cache and our donors would, without a model, and sums what is reused.

The prefix cache is the embedded engine's block manager; the look-up, the donors and their tiers are the connector's. A
model of the time to the first token, by computed and reused tokens, says what that saves."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from engine_wrapper.embedded.block_manager import BlockManager, RootKey
from engine_wrapper.embedded.llm_args import KvCacheConfig
from semblend_trt import cost
from semblend_trt.config import Settings
from semblend_trt.connector.lookup import DonorPlanner
from semblend_trt.connector.requests import TrackedRequest
from semblend_trt.discovery.fingerprint import TokenArray
from semblend_trt.discovery.planner import LookupRequest
from semblend_trt.donors.donor_index import DonorIndex
from semblend_trt.donors.offload import OffloadEvent, OffloadEventKind, SavedDonor
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input
from semblend_trt.plan import EngineMode, PlanKind, PlanSpan
from semblend_trt.policy import ReusePolicy
from semblend_trt.pool_facts import PoolFacts
from semblend_trt.reuse_profile import ReuseProfile

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Served(NamedTuple):
    """What became of one prompt: `prefix` tokens come from the prefix cache and `spans` from donors, or `reason` says
    why none do."""

    prefix: int
    spans: tuple[PlanSpan, ...]
    reason: str | None


class PrefixCache:
    """An engine's exact prefix cache, for one request at a time."""

    def __init__(self, pool: PoolFacts) -> None:
        config = KvCacheConfig(tokens_per_block=pool.geometry.block_size)
        self._blocks = BlockManager(pool.num_blocks, config, lambda _source, _target: None)

    def begin(self, namespace: str, tokens: tuple[int, ...]) -> int | None:
        """Return the held tokens of the prompt's prefix; None for a prompt that does not fit into the pool."""
        key = RootKey(cache_salt=namespace)
        match = self._blocks.match(key, tokens)
        if not self._blocks.fits(match, len(tokens)):
            return None
        held = self._blocks.add_sequence(0, key, match, len(tokens))
        self._blocks.allocate(0, len(tokens))
        return held

    def end(self, exact_tokens: tuple[int, ...]) -> None:
        """End the request; its blocks of these leading tokens, whose KV a cold run would produce, are held."""
        self._blocks.publish(0, exact_tokens)
        self._blocks.release(0)

    def serve(self, namespace: str, tokens: TokenArray) -> int:
        """Serve a prompt (int32 [n], n >= 1) without donors; return the held tokens of its prefix."""
        held = tuple(tokens.tolist())
        if (prefix := self.begin(namespace, held)) is None:
            return 0
        self.end(held)
        return prefix


class Serving:
    """An engine's caches and donors over a sequence of prompts, each served whole before the next. Not thread safe."""

    def __init__(self, settings: Settings, pool: PoolFacts, profile: ReuseProfile | None = None) -> None:
        """With a `profile` the settings' policy must be verified; every check then passes."""
        self._block_size, self._profile = pool.geometry.block_size, profile
        self._is_off = settings.policy is ReusePolicy.OFF
        self._prefixes = PrefixCache(pool)
        self.donors = DonorIndex(settings, pool, (), None, lambda _kind: None)
        # A pool that is known by a token's bytes alone has one layer.
        layers = pool.geometry.num_layers if profile is None else profile.geometry.num_layers
        layered = replace(pool, geometry=replace(pool.geometry, num_layers=layers))
        self._planner = DonorPlanner(settings, layered, self.donors)
        self._served = 0

    def serve(self, namespace: str, tokens: TokenArray) -> Served:
        """Serve one prompt (int32 [n], n >= 1)."""
        if self._is_off:
            return Served(self._prefixes.serve(namespace, tokens), (), "policy_off")
        held = tuple(tokens.tolist())  # its slices are the keys of blocks, without a copy
        if (prefix := self._prefixes.begin(namespace, held)) is None:
            return Served(0, (), "longer_than_pool")
        self._served += 1
        tracked = TrackedRequest(self._served, namespace, tokens, prefix)
        asked = (self._served, namespace, tokens, prefix, self._block_size, EngineMode.WRAPPER)
        lookup = LookupRequest(*asked, publication_guard=True, profile=self._profile)
        planned, tracked.leases = self._planner.plan(lookup)
        plan = tracked.plan = planned.plan
        tracked.release_leases()
        # As the connector does between a look-up and a request's end, where every save succeeds.
        generations = 0 if self._profile is None else self._profile.generations
        intent = self._planner.intend(str(self._served), tracked, 0, generations)
        if intent is not None:
            kept = tokens[: intent.max_tokens]
            if self.donors.begin_save(intent, namespace, kept, (), intent.generation):
                self.donors.saved(SavedDonor(intent.donor_id, len(kept)))
        self._prefixes.end(held if plan is None else held[: plan.exact_token_count])
        # The tiers obey at once; there is no disk tier.
        promoted = self.donors.offload.take_commands().promotions
        self.donors.take_events(deque(OffloadEvent(OffloadEventKind.PROMOTED, each) for each in promoted))
        if plan is None or plan.kind is PlanKind.DISCOVERY_ONLY:
            return Served(prefix, (), planned.outcome_reason if plan is None else None)
        return Served(prefix, plan.spans, None)


SHIPPED_TIMES = Path(str(files("validation") / "assets" / "h100_ttft.json"))
_FEWEST = 5  # observations
_COSTS = ("intercept_ms", "computed_ms", "reused_ms", "pair_ms")


@dataclass(frozen=True, slots=True)
class Observation:
    """`ttft_ms` milliseconds for a prompt of `computed` and `reused` tokens, which were checked or not."""

    ttft_ms: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    computed: Annotated[int, Field(ge=1)]
    reused: Annotated[int, Field(ge=0)]
    is_checked: bool = False


_OBSERVATIONS = TypeAdapter(list[Observation])


def recorded_observations(path: Path) -> list[Observation]:
    """Return the observations that a file lists as JSON. Raises ConfigurationError when it holds none."""
    try:
        return _OBSERVATIONS.validate_json(read_input(path))
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise ConfigurationError(f"{path} does not hold observations: {reason}.") from None


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Milliseconds to the first token: `intercept_ms`, and what each computed token, reused token and pair costs.

    A pair is a computed token and a token that it attends to; c computed after r reused ones make c x (r + c / 2).
    The ranges are those of the fitted observations. `check_ms`: what the check of a moved token adds, the mean over
    the checked observations, which are not fitted; None without one."""

    source: str
    observations: int
    intercept_ms: float
    computed_ms: float
    reused_ms: float
    pair_ms: float
    computed_range: tuple[int, int]
    reused_range: tuple[int, int]
    check_ms: float | None = None

    @classmethod
    def fitted(cls, observations: Sequence[Observation], source: str) -> "LatencyModel":
        """Fit by least squares of the relative errors, as times span orders of magnitude; no cost is below 0. Raises
        ConfigurationError for too few observations."""
        computed, reused, ttft = _arrays([each for each in observations if not each.is_checked])
        if len(ttft) < _FEWEST or len(np.unique(computed)) < 3:
            raise ConfigurationError(
                f"{source}: {len(ttft)} times to the first token with {len(np.unique(computed))} different numbers of "
                f"computed tokens; a latency model needs at least {_FEWEST} and 3, name a file that has them."
            )
        costs = cost.fitted(list(zip(_terms(computed, reused), ttft.tolist(), strict=True)))
        checked = _arrays([each for each in observations if each.is_checked and each.reused])
        added = (checked[2] - _terms(*checked[:2]) @ costs) / checked[1]
        return cls(
            source=source,
            observations=len(ttft),
            **dict(zip(_COSTS, costs, strict=True)),
            computed_range=(int(computed.min()), int(computed.max())),
            reused_range=(int(reused.min()), int(reused.max())),
            check_ms=max(0.0, float(added.mean())) if len(added) else None,
        )

    def predict(self, computed: Integers, reused: Integers) -> Floats:
        """Return milliseconds, float64 [requests], for int64 [requests] of tokens."""
        costs = np.array([getattr(self, name) for name in _COSTS])
        return np.asarray(_terms(computed, reused) @ costs, dtype=np.float64)

    def outside(self, computed: Integers, reused: Integers) -> npt.NDArray[np.bool_]:
        """Return where the model extrapolates, bool [requests]."""
        (least_computed, most_computed), (least_reused, most_reused) = self.computed_range, self.reused_range
        inside = (least_computed <= computed) & (computed <= most_computed)
        return ~(inside & (least_reused <= reused) & (reused <= most_reused))

    def sentence(self) -> str:
        """Return where the model comes from and what it says, for a report."""
        return (
            f"TTFT = {self.intercept_ms:.4g} ms + {self.computed_ms:.4g} ms a computed token + {self.reused_ms:.4g} ms "
            f"a reused token + {self.pair_ms:.4g} ms a pair in attention, fitted to {self.observations} observations "
            f"of {self.source}, {self.computed_range[0]:,} to {self.computed_range[1]:,} tokens computed and "
            f"{self.reused_range[0]:,} to {self.reused_range[1]:,} reused."
        )


def _arrays(observations: Sequence[Observation]) -> tuple[Integers, Integers, Floats]:
    computed = np.array([each.computed for each in observations], dtype=np.int64)
    reused = np.array([each.reused for each in observations], dtype=np.int64)
    return computed, reused, np.array([each.ttft_ms for each in observations], dtype=np.float64)


def _terms(computed: Integers, reused: Integers) -> Floats:
    c, r = computed.astype(np.float64), reused.astype(np.float64)
    return np.stack([np.ones_like(c), c, r, c * (r + c / 2)], axis=1)


class Figures:
    """Sums over the prompts that `serving` serves under terms of this name."""

    def __init__(self, terms: str, serving: Serving) -> None:
        self._terms, self.serving = terms, serving
        self._reasons = Counter[str]()
        # Its tokens, those in a prefix cache alone, those held with donors, and the moved ones of these.
        self._by_prompt = list[tuple[int, int, int, int]]()

    @property
    def prompts(self) -> int:
        return len(self._by_prompt)

    def add(self, tokens: int, prefix_alone: int, served: Served) -> None:
        """Add a prompt of `tokens` tokens, of which a prefix cache without donors holds `prefix_alone`."""
        if served.reason is not None:
            self._reasons[served.reason] += 1
        moved = sum(span.length for span in served.spans if not span.exact)
        held = served.prefix + sum(span.length for span in served.spans)
        self._by_prompt.append((tokens, prefix_alone, held, moved))

    def expected_ttft(self, model: LatencyModel) -> dict[str, Any]:
        """Return milliseconds to the first token of each prompt alone on the machine of `model`, and the share of the
        prompts with donors that lie outside of what the model was fitted to."""
        tokens, alone, held, moved = np.array(self._by_prompt, dtype=np.int64).T
        with_donors = model.predict(tokens - held, held)
        times = {
            "cold": model.predict(tokens, np.zeros_like(tokens)),
            "prefix_cache": model.predict(tokens - alone, alone),
            "with_donors": with_donors,
        }
        if model.check_ms is not None:
            times["with_checked_donors"] = with_donors + model.check_ms * moved
        found = {"model": asdict(model), "extrapolated_share": float(model.outside(tokens - held, held).mean())}
        for name, each in times.items():
            p50, p95 = map(float, np.quantile(each, (0.5, 0.95)))
            found[name] = {"mean_ms": float(each.mean()), "p50_ms": p50, "p95_ms": p95}
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form of all but times. Donors can take a little from the prefix cache,
        into which KV after moved text does not go."""
        tokens, alone, held, _ = map(sum, zip(*self._by_prompt, strict=True))
        return {
            "terms": self._terms,
            "prompts": self.prompts,
            "tokens": tokens,
            "longest_prompt": max(each[0] for each in self._by_prompt),
            "shares": {"prefix_cache": alone / tokens, "added": (held - alone) / tokens, "together": held / tokens},
            "prompts_without_donors": dict(self._reasons.most_common()),
        }
