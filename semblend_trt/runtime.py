"""What the scheduler, the worker and the engine wrapper of one engine in one process share.

TensorRT-LLM gives both connector classes only `llm_args` in common, so that object's identity finds the runtime."""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from semblend_trt.namespace import unknown_value
from semblend_trt.plan import EngineMode
from semblend_trt.ranks import Ranks
from semblend_trt.transfer.load import LayerReadiness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from semblend_trt.cost import CostModel
    from semblend_trt.donors.offload import DiskLink, OffloadEvent, SavedDonor
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan
    from semblend_trt.pool_facts import PoolFacts

logger = logging.getLogger(__name__)


class ActivePlans:
    """The plans of the running iteration, by request id: the worker writes them, and the engine wrapper reads them.

    A plan is *pending* from `put` until the forward that executes it takes it. Its publication limit outlives the plan:
    the request's blocks stay approximate until the engine has released them. Any thread may call."""

    def __init__(self) -> None:
        self._pending: dict[int, SemanticKvPlan] = {}
        self._exact_tokens: dict[int, int] = {}

    def put(self, plan: SemanticKvPlan) -> None:
        """Note the plan's publication limit, and make a plan for the wrapper pending (loads are idempotent)."""
        if plan.execution.mode is EngineMode.WRAPPER:
            self._pending[plan.request_id] = plan
        if not plan.is_exact:
            self._exact_tokens[plan.request_id] = plan.exact_token_count

    def take(self, request_id: int) -> SemanticKvPlan | None:
        """Remove and return the pending plan: one forward alone executes it."""
        return self._pending.pop(request_id, None)

    def take_all(self, request_ids: Iterable[int]) -> dict[int, SemanticKvPlan]:
        """Remove and return the pending plans of these requests. In most iterations there are no plans to look for."""
        if not self._pending:
            return {}
        return {each: plan for each in request_ids if (plan := self.take(each)) is not None}

    def publishable(self, request_id: int, tokens: int) -> int:
        """Return how many of the request's first `tokens` tokens may enter the engine's prefix cache.

        KV that attended to approximate KV is approximate too. So the limit, also for generated tokens and a late
        release, is the first position that a cold run would compute otherwise. Only whole blocks below it may be
        published: the block in which the exact part ends also holds approximate KV."""
        return min(tokens, self._exact_tokens.get(request_id, tokens))

    def withholds(self, request_id: int) -> bool:
        """Return whether some of the request's KV stays unpublished; for managers that publish all of it or nothing."""
        return request_id in self._exact_tokens

    def withhold(self, plan: SemanticKvPlan) -> None:
        """Let nothing of the request enter the prefix cache but the engine's own prefix: the plan was not kept."""
        self._exact_tokens[plan.request_id] = plan.num_computed_tokens

    def lift_limit(self, request_id: int) -> None:
        """Forget the limit, since the running forward computes all that the plan had placed."""
        self._exact_tokens.pop(request_id, None)

    def released(self, request_id: int) -> None:
        """Forget plan and limit once the engine has freed the request's blocks: its id may then be used again."""
        self.take(request_id)
        self.lift_limit(request_id)

    def __len__(self) -> int:
        return len(self._pending)


# The scheduler takes events at every look-up and at every request's end, so few ever wait.
MAX_EVENTS = 16384
# Words of 4 bytes that are summed together, each times a factor of its own.
_CHUNK = 1 << 20
_values: Callable[[Any], Iterable[torch.Tensor | None]] = dict.values
# The C functions themselves: to look them up by name for each tensor takes half as long again.
_address: Callable[[Any], int] = torch.Tensor.data_ptr
_write_count: Callable[[Any], int] = vars(torch._C.TensorBase)["_version"].__get__


class Weights:
    """The parameters and buffers of one model on one rank. KV belongs to the weights that it was computed with.

    Training loops and hot updates write weights in place. `have_changed` compares contents only after a hint: a
    tensor's end, another address, a higher write count of torch (`Tensor._version`), or `suspect`. A write through
    `Tensor.data` or a raw pointer raises no count, so every engine call that may write weights must call `suspect`."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Read all weights once. Raises RuntimeError or TypeError for tensors without an address."""
        self._model = model
        self._is_suspect = self._was_reset = self._has_waited = False
        self._watch()
        self._first = self._digest = weights_digest(model)
        self.prefix_is_stale = False

    @property
    def are_first(self) -> bool:
        """True while the weights equal those that the engine started with."""
        return self._digest == self._first

    def suspect(self) -> None:
        """Have the next `have_changed` compare contents: a call may have written weights."""
        if not self._is_suspect:
            self._is_suspect, self._was_reset = True, False

    def prefix_cache_reset(self) -> None:
        """Note that the engine has emptied its own prefix cache."""
        self._was_reset, self.prefix_is_stale = True, False

    def have_changed(self, *, is_due: bool = True) -> bool:
        """Return True once for every change of contents. Raises nothing: what cannot be read counts as changed. A call
        that is not due looks only after `suspect`. After one a write counts as a change, as it may have been undone.

        After a change `prefix_is_stale` until the engine's prefix cache is reset: it holds KV of the weights before."""
        if not (is_due or self._is_suspect):
            self._has_waited = True
            return False
        with suppress(RuntimeError, TypeError):  # a new tensor has no address or count
            if self._shown() == self._seen:
                self._has_waited = False
                if not self._is_suspect:
                    return False
        try:
            self._watch()
            digest = weights_digest(self._model)
        except Exception:
            logger.exception("the model's weights cannot be read; they count as changed")
            digest = unknown_value()
        changed = digest != self._digest or self._has_waited
        if changed:
            self.prefix_is_stale = not (self._is_suspect and self._was_reset)
        self._digest, self._is_suspect, self._has_waited = digest, False, False
        return changed

    def _watch(self) -> None:
        modules = list(self._model.modules())
        self._held = [each for module in modules for each in (module._parameters, module._buffers) if each]
        tensors = self._tensors()
        self._addressed = [each is not None for each in tensors]
        self._counted = [each is not None and not each.is_inference() for each in tensors]
        self._seen = self._shown()
        # An address may be given again, but only after the tensor's end. Nothing replaced is kept alive.
        self._alive = [weakref.ref(each, self._on_death) for each in (*modules, *compress(tensors, self._addressed))]

    def _on_death(self, _: object) -> None:
        self._held.clear()
        self.suspect()

    def _tensors(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(_values, self._held)))

    def _shown(self) -> tuple[list[int], list[int]]:
        """Return addresses, and write counts of all but inference tensors. In C alone, which a step waits for."""
        tensors = self._tensors()
        # vLLM's parameters override torch's functions in Python, which takes fifteen times as long.
        with torch._C.DisableTorchFunctionSubclass():
            addresses = list(map(_address, compress(tensors, self._addressed)))
            return addresses, list(map(_write_count, compress(tensors, self._counted)))


def weights_digest(model: torch.nn.Module) -> str:
    """Return a digest of names, dtypes, shapes and bytes of all parameters and buffers, in hex. Waits for the device.

    Contents enter as sums of 4-byte words times pseudo-random factors (multilinear hashing: Carter and Wegman, 1979). A
    card computes those at the speed of its memory. Two models differ with probability 1 - 2^-32 or more."""
    digest, factors = hashlib.blake2b(digest_size=16), dict[torch.device, torch.Tensor]()
    with torch.inference_mode():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            found = _sums(tensor, factors).tolist()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {found}\n".encode())
    return digest.hexdigest()


def _sums(tensor: torch.Tensor, factors: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    """Return one sum for each chunk, int64 [chunks]."""
    if tensor.is_meta or not tensor.numel():
        return torch.empty(0, dtype=torch.int64)
    if tensor.device not in factors:
        drawn = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=torch.Generator().manual_seed(49))
        factors[tensor.device] = drawn.to(tensor.device)
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()  # words begin at whole addresses
    whole = octets.numel() // 4 * 4
    words = [*octets[:whole].view(torch.int32).split(_CHUNK), *octets[whole:].split(_CHUNK)]
    products = ((each.long(), factors[tensor.device][: each.numel()]) for each in words)
    # CUDA has no dot product of integers.
    return torch.stack([(left * right).sum() if left.is_cuda else torch.dot(left, right) for left, right in products])


class AdapterWeights(NamedTuple):
    """A digest of an adapter's weights, in hex, and how often the adapter of its id has had others."""

    digest: str
    changes: int


def _held_weakly(name: str) -> Any:
    """Return an attribute kept weakly in `name`: its object holds `llm_args`, whose end must end the runtime."""

    def put(runtime: Runtime, value: Any) -> None:
        setattr(runtime, name, (lambda: None) if value is None else weakref.ref(value))

    return property(lambda runtime: getattr(runtime, name)(), put)


@dataclass(slots=True)
class Runtime:
    """Shared state of one engine; `engine` is the embedded one, and `scheduler` rank 0's half of the connector.

    - `mode`, `publication_guard`: set by the wrapper when it attaches.
    - `tokens_left`: last tokens of a prompt that every plan leaves to the engine.
    - `failed`: requests with holes in their KV, which the worker has to fail.
    - `engine_facts`: what the engine shows of itself, for the audit log.
    - `ended_saves`: requests whose end the engine does not know yet.
    - `saved` to `offload_events`: the newest MAX_EVENTS of each wait for the scheduler.
    - `disk`: there while the disk tier is open.
    - `pool`: set by the worker; if it refuses the caches, `refusal` says why.
    - `is_forward_open`: stays set if a forward fails.
    - `faults`: failed calls of the engine, by name.
    - `weights`: there if the worker knows the model; `weights_changes` counts their changes.
    - `are_weights_checked`: by a look-up, for the plans of the next forward.
    - `costs`: what plans take, once the engine has measured it."""

    active_plans: ActivePlans = field(default_factory=ActivePlans)
    readiness: LayerReadiness = field(default_factory=LayerReadiness)
    mode: EngineMode = EngineMode.STOCK
    tokens_left: int = 1
    failed: set[int] = field(default_factory=set)
    engine_facts: dict[str, Any] = field(default_factory=dict)
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
    are_weights_checked: bool = False
    costs: CostModel | None = None
    adapters: dict[int, AdapterWeights] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    _engine: Callable[[], Any] = field(default=lambda: None, init=False, repr=False)
    _scheduler: Callable[[], Any] = field(default=lambda: None, init=False, repr=False)

    engine = _held_weakly("_engine")
    scheduler = _held_weakly("_scheduler")

    def check_weights(self, *, is_due: bool = True) -> None:
        """Count a change of the model's weights since the last call; see `Weights.have_changed`."""
        if self.weights is not None and self.weights.have_changed(is_due=is_due):
            logger.warning("the model's weights have changed: what was computed with the weights before is dropped")
            self.weights_changes += 1

    def note_evidence(self, evidence: CheckEvidence) -> None:
        """Keep evidence for the scheduler. A dropped plan's KV was written over, so its request is exact again."""
        self.evidence.append(evidence)
        if evidence.is_dropped:
            self.active_plans.lift_limit(evidence.request_id)

    def saves_ended(self) -> None:
        """Have the scheduler take waiting events, because an idle engine does not call it. Other ranks drop them."""
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
    """Return the runtime of the engine that `llm_args` describes, the same one for the same object.
    Raises TypeError if `llm_args` cannot be weakly referenced, because its runtime would then outlive the engine."""
    key = id(llm_args)
    with _lock:
        if (runtime := _runtimes.get(key)) is None:
            weakref.finalize(llm_args, _runtimes.pop, key, None)
            runtime = _runtimes[key] = Runtime()
        return runtime
