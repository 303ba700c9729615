"""The scheduler half inside vLLM: our own one for every engine, told in TensorRT-LLM's words what vLLM does."""

from __future__ import annotations

import itertools
import logging
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_wrapper.vllm.hooks import guard_publication, watch_resets
from engine_wrapper.vllm.refusals import request_refusal
from engine_wrapper.vllm.stats import ReuseStats, tell_prefill
from engine_wrapper.vllm.steps import StepMetadata, Steps, recovery_for
from semblend_trt.connector import SemBlendKvConnectorScheduler
from semblend_trt.connector.contract import never_raises
from semblend_trt.outcome import VLLM_RECEIPT
from semblend_trt.plan import EngineMode
from semblend_trt.policy import COLD, EXACT_ONLY
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from semblend_trt.connector.engine_spec import EngineSpec

logger = logging.getLogger(__name__)


class RequestView:
    """A vLLM request with the attributes of TensorRT-LLM's that our scheduler reads; `taken_tokens`: what of its offer
    the engine took, where it has said so."""

    # Adapters and beams are refused by name.
    lora_task_id = None

    def __init__(self, number: int, request: Any, taken_tokens: int | None = None) -> None:
        self.request_id = number
        self.prompt_len = int(request.num_prompt_tokens)
        self.max_new_tokens = int(getattr(request, "max_tokens", 0) or 0)
        self.cache_salt: str | None = request.cache_salt
        asked = getattr(request, "kv_transfer_params", None)
        self.exact_only = isinstance(asked, dict) and asked.get(EXACT_ONLY) is True
        self.cold = isinstance(asked, dict) and asked.get(COLD) is True
        self._request = request
        if taken_tokens is not None:
            self.py_num_connector_matched_tokens = taken_tokens

    @property
    def refusal(self) -> str | None:
        """Read at the look-up alone, of the calls that a view is made for."""
        return request_refusal(self._request)

    def token_array(self, count: int) -> npt.NDArray[np.int32]:
        """The first tokens, int32 [count]."""
        tokens = self._request.all_token_ids[: max(0, count)]
        # NumPy reads a list of integers three times as slowly.
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), dtype=np.int32)


class PublicationGuard:
    """Keeps blocks that hold approximate KV out of vLLM's exact prefix cache, and out of its KV events.

    vLLM publishes a request's blocks while it schedules it, before any KV is loaded. So the limit is set at the lookup,
    and holds until the request has ended: what is generated after approximate KV is approximate too. `limit` and
    `release` go by the request's id in vLLM; the others are called in the place of the block pool's methods.
    """

    def __init__(self) -> None:
        self._exact: dict[str, int] = {}

    def limit(self, request_id: str, exact_tokens: int) -> None:
        """From now on only blocks within the request's first `exact_tokens` tokens are published."""
        self._exact[request_id] = exact_tokens

    def release(self, request_id: str) -> None:
        """Forgets the request: all of its KV is exact, or it has ended."""
        self._exact.pop(request_id, None)

    def full(
        self,
        stock: Callable[..., Any],
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Publishes full blocks, those of a limited request up to its limit."""
        exact = self._exact.get(request.request_id)
        if exact is not None:
            num_full_blocks = min(num_full_blocks, exact // block_size)
            if num_full_blocks <= num_cached_blocks:
                return None
            mask = options.get("block_mask")
            if mask is not None:
                options["block_mask"] = mask[: num_full_blocks - num_cached_blocks]
        return stock(request, blocks, num_cached_blocks, num_full_blocks, block_size, *arguments, **options)

    def partly(self, stock: Callable[..., Any], request: Any, *arguments: Any, **options: Any) -> Any:
        """Publishes a block that is not full, none of a limited request."""
        return None if request.request_id in self._exact else stock(request, *arguments, **options)


class VllmScheduler:
    """Its methods are called as vLLM calls a connector's; none raises into the engine."""

    def __init__(self, arguments: EngineSpec) -> None:
        self._runtime = runtime_for(arguments)
        self._scheduler = SemBlendKvConnectorScheduler(arguments)
        self._numbers: dict[str, int] = {}
        self._next_number = itertools.count(1)
        self._steps = Steps(self._number_of)
        self._saving: dict[int, str] = {}
        self._guard = PublicationGuard()
        self._undo = ExitStack()
        self._recovery = recovery_for(arguments)
        self.stats = ReuseStats()

    def bind_gpu_block_pool(self, pool: Any) -> None:
        """Guards the pool; without that nothing but exact prefixes is reused. The caches are registered by now."""
        try:
            self._undo.callback(guard_publication(pool, self._guard.full, self._guard.partly))
            self._undo.callback(watch_resets(pool, self._note_reset))
            self._runtime.publication_guard = True
        except AttributeError:
            logger.warning("vLLM's block pool publishes in a way that is not known; only exact prefixes are reused")
        try:
            self._recovery.bind()
        except Exception as error:
            logger.warning("KV is not reused, since vLLM could not recover where that fails: %s", error)
            self._runtime.refusal = self._runtime.refusal or "recovery"
        self._scheduler.wait_for_initialization()

    @never_raises(lambda: 0)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """The prompt tokens beyond `num_computed_tokens` whose KV we will place, none before the self-check.

        Before vLLM publishes any of them, the guard knows how many are exact.
        """
        number = self._number_of(request.request_id)
        self._guard.release(request.request_id)
        tokens, _ = self._scheduler.get_num_new_matched_tokens(RequestView(number, request), num_computed_tokens)
        plan = self._scheduler.plan_of(number)
        if self._runtime.mode is not EngineMode.WRAPPER:
            return 0  # a load that fails could not be mended by rows of ours yet
        if tokens and plan is not None and not plan.is_exact:
            self._guard.limit(request.request_id, plan.exact_token_count)
        return tokens

    @never_raises(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Learns the request's blocks; without external tokens vLLM has not taken the offer."""
        number = self._number_of(request.request_id)
        plan = self._scheduler.plan_of(number)
        is_declined = plan is not None and plan.matched_tokens > 0 and not num_external_tokens
        block_ids = [] if is_declined else list(blocks.get_block_ids()[0])
        self._scheduler.update_state_after_alloc(RequestView(number, request, num_external_tokens), block_ids)
        if getattr(request, "num_preemptions", 0) and (report := self._scheduler.reuse_of(number)) is not None:
            # vLLM has the counts of a run that is computed again.
            tell_prefill(request, report.exact_prefix_tokens, num_external_tokens)

    def update_connector_output(self, output: Any) -> None:
        """Hears what the worker half has told; vLLM has taken no token of a request whose load failed."""
        if getattr(output, "invalid_block_ids", None):
            self._recovery.begin_again()

    def build_connector_meta(self, output: Any) -> StepMetadata:
        """What the worker half does in this step. In one that cannot be read vLLM computes all that was promised."""
        saving, self._saving = self._saving, {}
        try:
            told_output, step = self._steps.read(output)
        except Exception:
            logger.exception("a step of vLLM cannot be read; nothing is reused from now on")
            self._runtime.faults["step_unreadable"] += 1
            self._runtime.refusal = self._runtime.refusal or "step_unreadable"
            return StepMetadata(self._scheduler.build_connector_meta(None), saving=saving, is_unread=True)
        return StepMetadata(self._scheduler.build_connector_meta(told_output), step, saving)

    @never_raises(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """True when the request's KV is being saved and its blocks must be held; the parameters of its answer."""
        number = self._numbers.pop(request.request_id, None)
        if number is None:
            return False, None
        is_saving = self._scheduler.request_finished(RequestView(number, request), list(block_ids))
        if is_saving:
            self._saving[number] = request.request_id
        self._guard.release(request.request_id)
        if (report := self._scheduler.outcomes.of(number)) is None:
            return is_saving, None
        self.stats.request_ended(report)
        return is_saving, {VLLM_RECEIPT: report.receipt}

    @never_raises(lambda: False)
    def reset_cache(self) -> bool:
        """Forgets all donors."""
        self._scheduler.forget_donors()
        return True

    def close(self) -> None:
        """Writes out what is held, and leaves vLLM's block pool as it was found."""
        self._scheduler.close()
        self._undo.close()

    def _note_reset(self, was_reset: bool) -> None:
        if was_reset and self._runtime.weights is not None:
            self._runtime.weights.prefix_cache_reset()

    def _number_of(self, request_id: str) -> int:
        """Our number for a request of vLLM, which names them by text."""
        if request_id not in self._numbers:
            self._numbers[request_id] = next(self._next_number)
        return self._numbers[request_id]
