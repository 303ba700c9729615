"""What our scheduler half tells the worker half of one step, beside what it tells every engine's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from semblend_trt.connector.contract import RequestData, SchedulerOutput
from semblend_trt.connector.metadata import SemBlendConnectorMetadata

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request of a step: our number for it, its first position, how many tokens, and all of its blocks."""

    number: int
    begin: int
    tokens: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """`told` is for our worker. `step` holds the requests by vLLM's id; `saving` those, vLLM's id by our number, that
    ended since the last step and whose blocks are held until they are saved. `is_unread`: it was not readable."""

    told: SemBlendConnectorMetadata = field(default_factory=SemBlendConnectorMetadata)
    step: dict[str, Scheduled] = field(default_factory=dict)
    saving: dict[int, str] = field(default_factory=dict)
    is_unread: bool = False


class Steps:
    """Reads what vLLM schedules, step by step: it tells new blocks only, and no tokens of requests that go on.

    Facts: vLLM, `v1/core/sched/output.py` (0.25.1 to 0.32).
    """

    def __init__(self, number_of: Callable[[str], int]) -> None:
        """`number_of` gives our number by vLLM's id."""
        self._number_of = number_of
        self._blocks: dict[str, list[int]] = {}

    def read(self, output: Any) -> tuple[SchedulerOutput, dict[str, Scheduled]]:
        """The step as TensorRT-LLM would tell it, and its requests by vLLM's id."""
        for gone in output.finished_req_ids:
            self._blocks.pop(gone, None)
        new, known, step = list[Any](), list[Any](), dict[str, Scheduled]()
        counts = output.num_scheduled_tokens
        for request in output.scheduled_new_reqs:
            self._blocks.pop(request.req_id, None)  # the V2 runner is told so of those that come back from preemption
            self._add(new, step, request.req_id, request.num_computed_tokens, counts, request.block_ids[0])
        cached = output.scheduled_cached_reqs
        gained = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request_id, begin, block_ids in gained:
            own = [] if block_ids is None else block_ids[0]
            if request_id in cached.resumed_req_ids:
                self._blocks.pop(request_id, None)
                self._add(new, step, request_id, begin, counts, own)
            else:
                self._add(known, step, request_id, begin, counts, own)
        return SchedulerOutput(new_requests=new, cached_requests=known), step

    def _add(
        self,
        found: list[Any],
        step: dict[str, Scheduled],
        request_id: str,
        begin: int,
        counts: dict[str, int],
        new_block_ids: list[int],
    ) -> None:
        held = self._blocks.setdefault(request_id, [])
        held.extend(new_block_ids)
        number, count = self._number_of(request_id), counts[request_id]
        step[request_id] = Scheduled(number, begin, count, tuple(held))
        found.append(
            RequestData(
                request_id=number,
                new_tokens=[],
                new_block_ids=list(new_block_ids),
                computed_position=begin,
                num_scheduled_tokens=count,
            )
        )
