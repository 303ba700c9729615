"""What the scheduler, the worker and the engine wrapper of one engine in one process share.

TensorRT-LLM builds both connector classes from the same `llm_args` and gives them no other way to meet, so the
runtime is found by the identity of that object.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import semblend_trt
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import EngineMode
from semblend_trt.ranks import Ranks, ranks_of
from semblend_trt.streams import Event, Stream, wait

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    import torch

    from kernels.layout import KvGeometry
    from semblend_trt.connector.weights import Weights
    from semblend_trt.donors.offload import DiskLink, OffloadEvent
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan

logger = logging.getLogger(__name__)


class ActivePlans:
    """The plans of the running iteration, by request id: written by the worker, read by the engine wrapper.

    A plan is *pending* from `put` until the forward that executes it takes it. Its publication limit outlives the plan:
    blocks written by the request stay approximate until the engine has released them. Any thread may call.
    """

    def __init__(self) -> None:
        self._pending: dict[int, SemanticKvPlan] = {}
        self._exact_tokens: dict[int, int] = {}

    def put(self, plan: SemanticKvPlan) -> None:
        """Notes the plan's publication limit, and makes a plan for the wrapper pending (loads are idempotent)."""
        if plan.execution.mode is EngineMode.WRAPPER:
            self._pending[plan.request_id] = plan
        if not plan.is_exact:
            self._exact_tokens[plan.request_id] = plan.exact_token_count

    def take(self, request_id: int) -> SemanticKvPlan | None:
        """Returns the pending plan and removes it: a plan is executed by one forward only."""
        return self._pending.pop(request_id, None)

    def take_all(self, request_ids: Iterable[int]) -> dict[int, SemanticKvPlan]:
        """The pending plans of these requests, removed as by `take`. In most iterations there is none to look for."""
        if not self._pending:
            return {}
        return {each: plan for each in request_ids if (plan := self.take(each)) is not None}

    def publishable(self, request_id: int, tokens: int) -> int:
        """How many of the request's first `tokens` tokens may enter the engine's reuse tree.

        KV that attended to approximate KV is approximate too. So the limit is the first position that a cold run would
        have computed otherwise; it holds for the prompt, the generated tokens and a late release. Only whole blocks
        below it may be published: the block in which the exact part ends also holds approximate KV.
        """
        return min(tokens, self._exact_tokens.get(request_id, tokens))

    def withholds(self, request_id: int) -> bool:
        """True when some of the request's KV may not be published; for managers that publish all of it or nothing."""
        return request_id in self._exact_tokens

    def lift_limit(self, request_id: int) -> None:
        """Forgets the limit, since the running forward computes all that the plan had placed."""
        self._exact_tokens.pop(request_id, None)

    def released(self, request_id: int) -> None:
        """Call it once the engine has freed the request's blocks; its id may then be used again. A plan that no forward
        has run is forgotten too."""
        self.take(request_id)
        self.lift_limit(request_id)

    def __len__(self) -> int:
        return len(self._pending)


class LayerReadiness:
    """The layers that are still on their way, in the order in which they arrive.

    A forward that calls `wait` before every layer, on the stream it runs on, sets `is_awaited`. Without one, and
    where no Python runs between the layers (CUDA graphs, compiled layers), `join` makes the whole load precede what
    follows on a stream. The engine's thread alone uses it.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._groups: Generator[tuple[int, Event | None]] | None = None
        self._queued: deque[tuple[int, Event | None]] = deque()
        self._ahead = self._arrived_layers = 0

    @property
    def is_arriving(self) -> bool:
        """True while some layers are not waited for yet: what reads them must call `wait` or `join`."""
        return bool(self._queued) or self._groups is not None

    def expect(self, groups: Generator[tuple[int, Event | None]], ahead: int = 1) -> None:
        """Announces one load. Each group, (end_layer, event), says: layers below `end_layer` are in the pool behind
        `event`. Asking `groups` for one queues its transfer: here for the first `ahead`, which is at least 1, and then
        for so many beyond the layers that a forward has come to. What was announced before must have been joined."""
        self._groups, self._ahead, self._arrived_layers = groups, ahead, 0
        self._ask()

    def wait(self, layer: int, stream: Stream | None) -> None:
        """Queues on `stream` that what follows, which reads or writes `layer`, starts once it is in the pool. Raises
        what a further transfer raises."""
        while self._queued and self._arrived_layers <= layer:
            self._arrived_layers, event = self._queued.popleft()
            wait(stream, [event])
            self._ask()

    def join(self, stream: Stream | None) -> None:
        """Queues on `stream` that what follows starts once every layer is in the pool."""
        while self._queued:
            wait(stream, [self._queued.popleft()[1]])
            self._ask()

    def abandon(self, stream: Stream | None) -> None:
        """Has no further transfer queued, and those that were precede what follows on `stream`: the forward that was to
        read the layers has failed."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self.join(stream)

    def _ask(self) -> None:
        while self._groups is not None and len(self._queued) < self._ahead:
            group = next(self._groups, None)
            if group is None:
                self._groups = None
            else:
                self._queued.append(group)


# The scheduler takes events at every look-up and at every request's end, so few ever wait.
MAX_EVENTS = 16384


@dataclass(frozen=True, slots=True)
class SavedDonor:
    """What the worker holds of one donor: `tokens` positions; 0 when `error` says why it could not be kept."""

    donor_id: str
    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The registered pool as the worker found it: `num_blocks` blocks of this geometry and dtype. `scales`: a digest of
    those that `needs_scales` asks for. `chunk`: the tokens of a chunk where some layers attend to no others.
    `holds_saved_blocks`: a request that is being saved keeps its own blocks until its save has ended."""

    geometry: KvGeometry
    num_blocks: int
    dtype: torch.dtype
    scales: str | None = None
    chunk: int | None = None
    holds_saved_blocks: bool = False


def _held_weakly(name: str) -> Any:
    """An attribute that is kept in `name` as a weak reference: its object holds `llm_args`, whose end must end the
    runtime."""

    def get(runtime: Runtime) -> Any:
        reference = getattr(runtime, name)
        return None if reference is None else reference()

    def put(runtime: Runtime, value: Any) -> None:
        setattr(runtime, name, None if value is None else weakref.ref(value))

    return property(get, put)


@dataclass(slots=True)
class Runtime:
    """Shared state of one engine; `engine` is the embedded one, and `scheduler` the connector's, None without one.

    `mode` and `publication_guard` are set by the wrapper when it attaches; `pool` by the worker when the caches are
    registered, and stays None when it refuses their layout (`refusal` then says why). `ranks` share the model; rank 0
    alone has a scheduler.

    The newest MAX_EVENTS of each kind wait for the scheduler: the worker's `saved` and `failed_loads`, the wrapper's
    `evidence` of every plan whose check ran, and the tiers' `offload_events`. `disk` links the tiers to the scheduler
    while the disk tier is open. `ended_saves` are requests of whose end the worker has not told the engine yet.

    `faults` counts calls of the engine that could not be answered, by name. `readiness` says which layers of the
    running loads are in the pool. `is_forward_open` from the start of an iteration's loads until the worker hears that
    its forward has completed. A forward that failed leaves it open.

    `weights` are the model's where the worker knows the model. `weights_changes` counts how often they have changed.
    """

    active_plans: ActivePlans = field(default_factory=ActivePlans)
    readiness: LayerReadiness = field(default_factory=LayerReadiness)
    mode: EngineMode = EngineMode.STOCK
    publication_guard: bool = False
    ended_saves: deque[int] = field(default_factory=deque)
    saved: deque[SavedDonor] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    failed_loads: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    evidence: deque[CheckEvidence] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    offload_events: deque[OffloadEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    disk: DiskLink | None = None
    pool: PoolFacts | None = None
    refusal: str | None = None
    is_forward_open: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    weights: Weights | None = None
    weights_changes: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    _engine: weakref.ref[Any] | None = field(default=None, init=False, repr=False)
    _scheduler: weakref.ref[Any] | None = field(default=None, init=False, repr=False)

    engine = _held_weakly("_engine")
    scheduler = _held_weakly("_scheduler")

    def caches_registered(self) -> None:
        """Has the scheduler, where there is one, build what look-ups need."""
        if (scheduler := self.scheduler) is not None:
            scheduler.wait_for_initialization()

    def check_weights(self) -> None:
        """Count a change of the model's weights, if there has been one since the last call."""
        if self.weights is not None and self.weights.have_changed():
            logger.warning("the model's weights have changed: what was computed with the weights before is dropped")
            self.weights_changes += 1

    def note_evidence(self, evidence: CheckEvidence) -> None:
        """Keeps evidence for the scheduler. A dropped plan's KV was written over, so its request is exact again."""
        self.evidence.append(evidence)
        if evidence.is_dropped:
            self.active_plans.lift_limit(evidence.request_id)

    def saves_ended(self) -> None:
        """Has the scheduler take the waiting events, on the engine's thread: an idle engine does not call the
        scheduler. A rank without a scheduler drops them. Raises nothing."""
        if self.ranks.rank:
            for waiting in (self.saved, self.failed_loads, self.evidence, self.offload_events):
                waiting.clear()
            return
        try:
            if self.saved and (scheduler := self.scheduler) is not None:
                scheduler.take_events()
        except Exception:
            logger.exception("ended saves could not be told")
            self.faults["saved_news"] += 1


_lock = threading.Lock()
_runtimes: dict[int, Runtime] = {}


def runtime_for(llm_args: Any) -> Runtime:
    """Returns the runtime of the engine that `llm_args` describes, the same one for the same object.

    Raises TypeError when `llm_args` cannot be weakly referenced, because its runtime would then outlive the engine.
    """
    key = id(llm_args)
    with _lock:
        runtime = _runtimes.get(key)
        if runtime is None:
            weakref.finalize(llm_args, _runtimes.pop, key, None)
            runtime = _runtimes[key] = Runtime()
        return runtime


def join_ranks(runtime: Runtime, size: int) -> None:
    """Finds the engine's `size` ranks where the engine has not set them; without them nothing is reused."""
    if runtime.ranks.size == size:
        return
    found = ranks_of(size)
    if found is None:
        logger.warning("KV reuse is off: the ranks of this engine cannot tell one another what became of their loads")
        runtime.refusal = runtime.refusal or "ranks_unknown"
    else:
        runtime.ranks = found


def agree_on_start(runtime: Runtime, error: ConfigurationError | None) -> None:
    """Adopts the first refusal of any rank on all of them; an error of one rank is raised on all.

    Ranks of different versions refuse: they would read one another's metadata differently.
    """
    gathered = runtime.ranks.gather((semblend_trt.__version__, runtime.refusal, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = next((text for _, _, text in gathered if text is not None), None)
    if failed is not None:
        raise ConfigurationError(f"another rank cannot start: {failed}")
    if len({version for version, _, _ in gathered}) > 1:
        runtime.refusal = runtime.refusal or "metadata_version"
    runtime.refusal = runtime.refusal or next((refusal for _, refusal, _ in gathered if refusal is not None), None)
