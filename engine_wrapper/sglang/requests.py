"""SGLang's requests and steps as the connector's scheduler half reads them, and that half inside SGLang.

Facts: SGLang 0.5.23, `srt/managers/schedule_batch.py` (`Req`)."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_wrapper.sglang.refusals import request_refusal
from semblend_trt.connector import SemBlendKvConnectorScheduler
from semblend_trt.connector.contract import RequestData, SchedulerOutput, never_raises
from semblend_trt.connector.engine_spec import EngineRequest
from semblend_trt.outcome import RECEIPT

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class RequestView(EngineRequest):
    """A Req for the scheduler half. Adapters and beams are refused by name."""

    def __init__(self, number: int, request: Any, taken_tokens: int | None = None) -> None:
        self.request_id, self._request, self.taken_tokens = number, request, taken_tokens
        self.prompt_len = len(request.origin_input_ids)
        sampling = request.sampling_params
        self.max_new_tokens = int(getattr(sampling, "max_new_tokens", 0) or 0)
        self.ask(getattr(sampling, "custom_params", None))
        # SGLang keeps two keys apart, and each of them may be set.
        pair = request.cache_salt, request.extra_key
        self.cache_salt = None if pair == (None, None) else json.dumps(pair)

    @property
    def refusal(self) -> str | None:
        """Evaluated at the look-up alone."""
        return request_refusal(self._request)

    def token_array(self, count: int) -> npt.NDArray[np.int32]:
        """Return the first tokens, int32 [count]."""
        return np.asarray(self._request.full_untruncated_fill_ids[: max(0, count)], dtype=np.int32)


@dataclass(slots=True)
class Followed:
    """A request between look-up and end. `offered`: what was promised to SGLang after `exact` tokens of its own prefix.

    `slots`: those for the promised tokens, int64. `is_due`: these tokens are not computed yet."""

    number: int
    exact: int = 0
    offered: int = 0
    slots: torch.Tensor | None = None
    is_due: bool = False
    written: int = 0


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request of a step: `row` in SGLang's batch, and the `tokens` from position `begin` on."""

    number: int
    rid: str
    row: int
    begin: int
    tokens: int


class Requests(dict[str, Followed]):
    """Requests by SGLang's id. Each look-up of one begins it again."""

    def __init__(self) -> None:
        super().__init__()
        self._next = itertools.count(1)

    def begun(self, rid: str) -> Followed:
        """Return the request, before any step; its number stays."""
        known = self.get(rid)
        self[rid] = found = Followed(next(self._next) if known is None else known.number)
        return found

    def step(self, batch: Any) -> tuple[SchedulerOutput, list[Scheduled]]:
        """Return the step of a ForwardBatch in TensorRT-LLM's form, and its known requests."""
        new, known, step = list[RequestData](), list[RequestData](), list[Scheduled]()
        is_decode = batch.forward_mode.is_decode()
        for row, rid in enumerate(batch.rids or ()):
            if (followed := self.get(rid)) is None:
                continue
            begin = followed.written if is_decode else int(batch.extend_prefix_lens_cpu[row])
            tokens = 1 if is_decode else int(batch.extend_seq_lens_cpu[row])
            step.append(Scheduled(followed.number, rid, row, begin, tokens))
            # SGLang tells a request's slots at its end alone: its prefix cache may exchange them.
            (known if followed.written else new).append(RequestData(followed.number, [], [], begin, tokens))
            followed.written = begin + tokens
        return SchedulerOutput(new_requests=new, cached_requests=known), step


class SglangScheduler(SemBlendKvConnectorScheduler):
    """The scheduler half for every engine, with an end that takes SGLang's slots."""

    @never_raises(lambda: False)
    def ended(self, request: RequestView, slots: list[int]) -> bool:
        """Record the end of a request whose KV is in `slots`; return True if it is to be saved.

        Overlapped steps may have computed a token more than the request keeps."""
        if (tracked := self._requests.get(request.request_id)) is not None:
            tracked.written_tokens = min(tracked.written_tokens, len(slots))
        return bool(self.request_finished(request, slots))

    def give_receipt(self, number: int, request: Any) -> None:
        """Put the receipt of a request that has ended beside the last token of a Req's answer."""
        report = self.outcomes.of(number)
        if report is not None and request.customized_info is None and len(request.output_ids):
            receipt = report.receipt if self.worker is None else report.receipt | {"worker": self.worker}
            request.customized_info = {RECEIPT: [None] * (len(request.output_ids) - 1) + [receipt]}
