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

from semblend_trt.plan import EngineMode
from semblend_trt.ranks import Ranks
from semblend_trt.streams import Event, Stream, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from kernels.layout import KvGeometry
    from semblend_trt.donors.offload import DiskLink, OffloadEvent
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan

logger = logging.getLogger(__name__)


class ActivePlans:
    """Thread-safe plans by request id.

    A plan is *pending* from `put` until the forward that executes it calls `take`. Its publication limit outlives the
    plan: blocks written by the request stay approximate until the engine has released them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, SemanticKvPlan] = {}
        self._exact_tokens: dict[int, int] = {}

    def put(self, plan: SemanticKvPlan) -> None:
        """Notes the plan's publication limit, and makes a plan for the wrapper pending (loads are idempotent)."""
        with self._lock:
            if plan.execution.mode is EngineMode.WRAPPER:
                self._pending[plan.request_id] = plan
            if not plan.is_exact:
                self._exact_tokens[plan.request_id] = plan.exact_token_count

    def take(self, request_id: int) -> SemanticKvPlan | None:
        """Returns the pending plan and removes it: a plan is executed by one forward only."""
        with self._lock:
            return self._pending.pop(request_id, None)

    def take_all(self, request_ids: Iterable[int]) -> dict[int, SemanticKvPlan]:
        """The pending plans of these requests, removed as by `take`. In most iterations there is none to look for."""
        with self._lock:
            if not self._pending:
                return {}
            return {each: self._pending.pop(each) for each in request_ids if each in self._pending}

    def publishable_tokens(self, request_id: int) -> int | None:
        """Leading tokens whose KV equals a cold run's; None when all of the request's KV does."""
        with self._lock:
            return self._exact_tokens.get(request_id)

    def computed_whole(self, request_id: int) -> None:
        """Lifts the publication limit of a request whose plan was dropped: the forward, in which this is said, computed
        everything that the plan had placed, and so wrote over it."""
        self.released(request_id)

    def discard(self, request_id: int) -> None:
        """Drops the pending plan of a request that ends before any forward ran it."""
        with self._lock:
            self._pending.pop(request_id, None)

    def released(self, request_id: int) -> None:
        """Forgets the publication limit. Only the owner of the blocks may say so, once it has let go of them:
        forgetting earlier would publish approximate KV."""
        with self._lock:
            self._exact_tokens.pop(request_id, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)


class LayerReadiness:
    """The layers that are still on their way, in the order in which they arrive.

    A forward that calls `wait` before every layer, on the stream it runs on, sets `is_awaited`. Where nobody does, and
    wherever no Python runs between the layers (CUDA graphs, compiled layers), `join` makes the whole load precede what
    follows on a stream. The engine's thread alone uses it.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._arriving: deque[tuple[int, Event]] = deque()
        self._arrived_layers = 0

    @property
    def is_arriving(self) -> bool:
        """True while some layers are waited for by nobody yet: what reads them must call `wait` or `join`."""
        return bool(self._arriving)

    def expect(self, groups: Iterable[tuple[int, Event | None]]) -> None:
        """Announces one load. Each group, (end_layer, event), says: layers below `end_layer` are in the pool behind
        `event`. What was announced before must have been joined."""
        self._arrived_layers = 0
        self._arriving.extend((end_layer, event) for end_layer, event in groups if event is not None)

    def wait(self, layer: int, stream: Stream | None) -> None:
        """Queues on `stream` that what follows, which reads or writes `layer`, starts once it is in the pool."""
        while self._arriving and self._arrived_layers <= layer:
            self._arrived_layers, event = self._arriving.popleft()
            wait(stream, [event])

    def join(self, stream: Stream | None) -> None:
        """Queues on `stream` that what follows starts once every layer is in the pool."""
        while self._arriving:
            wait(stream, [self._arriving.popleft()[1]])


# A scheduler reads the news at every lookup and at every request's end, so that never more than the running requests'
# wait.
MAX_NEWS = 16384


@dataclass(frozen=True, slots=True)
class SavedDonor:
    """The worker's word on one donor: `tokens` positions are held, or none (any more) when `error` says why not."""

    donor_id: str
    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The registered pool as the worker found it: `num_blocks` blocks of this geometry and dtype."""

    geometry: KvGeometry
    num_blocks: int
    dtype: torch.dtype


@dataclass(slots=True)
class Runtime:
    """Shared state of one engine.

    `mode` and `publication_guard` are set by the wrapper when it attaches; `pool` by the worker when the caches are
    registered, and stays None when it refuses their layout (`refusal` then says why). `saved` and `failed_loads` are
    the worker's news, and `evidence` the wrapper's, of every plan whose check ran; the scheduler reads them at its next
    call, the newest MAX_NEWS of each. `readiness` says which layers of the running loads are in the pool.
    `faults` counts calls of the engine that could not be answered, by name.
    `offload_events` is what the tiers have to tell, `disk` their link to the scheduler while the disk tier is open.
    `check_layers` are those in which the scheduler's plans may check their spans.
    `ranks` share the model; the scheduler stands on rank 0 alone.
    `is_forward_open` from the start of an iteration's loads until the worker hears that its forward has completed. A
    forward that failed leaves it open.
    """

    active_plans: ActivePlans = field(default_factory=ActivePlans)
    readiness: LayerReadiness = field(default_factory=LayerReadiness)
    mode: EngineMode = EngineMode.STOCK
    publication_guard: bool = False
    saved: deque[SavedDonor] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    failed_loads: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    evidence: deque[CheckEvidence] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    offload_events: deque[OffloadEvent] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    disk: DiskLink | None = None
    pool: PoolFacts | None = None
    refusal: str | None = None
    is_forward_open: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    check_layers: tuple[int, ...] = ()
    ranks: Ranks = field(default_factory=Ranks)
    _engine: weakref.ref[Any] | None = field(default=None, init=False, repr=False)
    _reader: weakref.WeakMethod[Callable[[], None]] | None = field(default=None, init=False, repr=False)
    _prepare: weakref.WeakMethod[Callable[[], None]] | None = field(default=None, init=False, repr=False)

    @property
    def engine(self) -> Any:
        """The embedded engine, None without one. Held weakly: it holds `llm_args`, whose end ends this runtime."""
        return None if self._engine is None else self._engine()

    @engine.setter
    def engine(self, engine: Any) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def read_by(self, reader: Callable[[], None], prepare: Callable[[], None] | None = None) -> None:
        """From now on `reader` is called when saves have ended: an engine that has nothing to run asks the scheduler
        nothing, and would leave its last donors untold. `prepare` is called when the caches are registered. Both are
        methods and held weakly."""
        self._reader = weakref.WeakMethod(reader)
        self._prepare = None if prepare is None else weakref.WeakMethod(prepare)

    def caches_registered(self) -> None:
        """Has the scheduler, where there is one, build what lookups need; it raises nothing."""
        prepare = None if self._prepare is None else self._prepare()
        if prepare is not None:
            prepare()

    def news_came(self) -> None:
        """Has the news read, in the engine's thread. Raises nothing."""
        reader = None if self._reader is None else self._reader()
        try:
            if reader is not None and self.saved:
                reader()
        except Exception:
            logger.exception("news of ended saves could not be read")
            self.faults["saved_news"] += 1

    def forget_news(self) -> None:
        """Drops the news of a rank without a scheduler: nobody reads them there."""
        for news in (self.saved, self.failed_loads, self.evidence, self.offload_events):
            news.clear()


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
