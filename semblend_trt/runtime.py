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

from semblend_trt.active_plans import ActivePlans
from semblend_trt.layer_readiness import LayerReadiness
from semblend_trt.plan import EngineMode
from semblend_trt.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kernels.layout import KvGeometry
    from semblend_trt.donors.offload import DiskLink, TierNews
    from semblend_trt.evidence import CheckEvidence

logger = logging.getLogger(__name__)

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
    `tier_news` is what the tiers have to tell, `disk` their link to the scheduler while the disk tier is open.
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
    tier_news: deque[TierNews] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
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
        for news in (self.saved, self.failed_loads, self.evidence, self.tier_news):
            news.clear()


__all__ = ["EngineMode", "PoolFacts", "Runtime", "SavedDonor", "runtime_for"]

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
