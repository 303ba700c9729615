"""What the workers report to the scheduler where vLLM runs them in processes of their own, as for tensor parallelism.

Elsewhere both halves of the connector share a runtime. The scheduler's process has one of its own then, which takes
over what the workers' ranks say: once at the start, and with the output of every step in which something is new.

Facts: vLLM (0.28 to 0.32), `distributed/kv_transfer/kv_connector/v1/base.py` (handshake and worker metadata) and
`utils.py` beside it (`KVOutputAggregator` goes through the ranks in their order)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata

from semblend_trt.plan import EngineMode

if TYPE_CHECKING:
    from semblend_trt.connector.engine_spec import Caches
    from semblend_trt.cost import CostModel
    from semblend_trt.pool_facts import PoolFacts
    from semblend_trt.runtime import AdapterWeights, Runtime

# Events of rank 0 that wait in a runtime for its scheduler. The other ranks have the same ones.
_EVENTS = ("saved", "failed_loads", "evidence", "offload_events")


@dataclass(frozen=True, slots=True)
class StartReport(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank has found as it registered its caches."""

    refusal: str | None
    pool: PoolFacts | None
    caches: Caches


@dataclass(frozen=True, slots=True)
class RankState:
    """What lasts of a rank. Weights changed `weights_changes` times, and are the first ones again or not."""

    refusal: str | None = None
    mode: EngineMode = EngineMode.STOCK
    costs: CostModel | None = None
    tokens_left: int = 1
    weights_changes: int = 0
    has_first_weights: bool = True
    adapters: dict[int, AdapterWeights] = field(default_factory=dict)


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What is new of one rank, or of all. `begins_again`: running requests are to be computed again."""

    state: RankState
    events: dict[str, tuple[Any, ...]]
    faults: Counter[str]
    begins_again: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Return one report for both ranks: rank 0's, with what any rank refuses, fails at or wants."""
        assert isinstance(other, StepReport)
        ours, theirs = self.state, other.state
        state = replace(
            ours,
            refusal=ours.refusal or theirs.refusal,
            weights_changes=max(ours.weights_changes, theirs.weights_changes),
            has_first_weights=ours.has_first_weights and theirs.has_first_weights,
        )
        events = {name: self.events.get(name) or other.events.get(name, ()) for name in _EVENTS}
        return StepReport(state, events, self.faults + other.faults, self.begins_again or other.begins_again)

    def apply(self, runtime: Runtime, weights: RemoteWeights) -> None:
        """Have the scheduler's runtime hold it; `weights` are that runtime's."""
        state = self.state
        runtime.refusal = runtime.refusal or state.refusal
        runtime.mode, runtime.costs, runtime.tokens_left = state.mode, state.costs, state.tokens_left
        runtime.adapters.update(state.adapters)
        weights.heard(changed=state.weights_changes > runtime.weights_changes, are_first=state.has_first_weights)
        runtime.weights_changes = max(runtime.weights_changes, state.weights_changes)
        runtime.faults.update(self.faults)
        for name, events in self.events.items():
            getattr(runtime, name).extend(events)


class Reporter:
    """Makes the reports of one rank's steps."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._sent, self._faults = runtime, RankState(), Counter[str]()

    def report(self, *, begins_again: bool) -> StepReport | None:
        """Return what is new since the last call, or None."""
        runtime = self._runtime
        are_first = runtime.weights is None or runtime.weights.are_first
        changes, adapters = runtime.weights_changes, dict(runtime.adapters)
        known = runtime.refusal, runtime.mode, runtime.costs, runtime.tokens_left
        state = RankState(*known, changes, are_first, adapters)
        events = {name: tuple(getattr(runtime, name)) for name in _EVENTS}
        for name in _EVENTS:
            getattr(runtime, name).clear()
        faults, self._faults = runtime.faults - self._faults, Counter(runtime.faults)
        if state == self._sent and not (any(events.values()) or faults or begins_again):
            return None
        self._sent = state
        return StepReport(state, {} if runtime.ranks.rank else events, faults, begins_again)


class RemoteWeights:
    """The weights of workers in other processes, in the place of `Weights`: they compare, and this one hears of it."""

    def __init__(self) -> None:
        self.are_first, self.prefix_is_stale = True, False
        self.suspicions = 0
        self._was_reset = False

    def suspect(self) -> None:
        """Have the workers compare at their next step: a call may have written weights."""
        self.suspicions += 1
        self._was_reset = False

    def prefix_cache_reset(self) -> None:
        """Note that vLLM has emptied its own prefix cache."""
        self._was_reset, self.prefix_is_stale = True, False

    def have_changed(self, **_: bool) -> bool:
        """False: a report says it."""
        return False

    def heard(self, *, changed: bool, are_first: bool) -> None:
        """Learn what a report says. vLLM's prefix cache is stale unless it was reset after the call that may have
        written weights."""
        self.are_first = are_first
        if changed:
            self.prefix_is_stale = not (self.suspicions and self._was_reset)
