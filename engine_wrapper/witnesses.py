"""Witnesses: kept tokens that all layers compute, and that are compared with the donor's KV they stand in for.

Their rows write K and V into the pool as any others do. So the donor's are copied before the forwards, and both are
compared behind them, in all layers at once: the layers themselves, captured or compiled, need no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.deviation import put_token_rows, relative, token_rows, token_squares
from kernels.layout import PagedKv

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_wrapper.layer_schedule import EvidenceSink
    from engine_wrapper.sequence_work import SequenceWork
    from kernels.layout import KvGeometry, Pool
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan
    from semblend_trt.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """The work of this `index`: `positions` of its witnesses, int64, and the donors' KV there, some layers each."""

    index: int
    plan: SemanticKvPlan
    positions: torch.Tensor
    kv: PagedKv
    donor: list[torch.Tensor]


class Witnesses:
    """The witnesses of the works of one iteration, from before its forwards on. False where no work has any.

    With `ranks` that share the KV heads the deviations are over all heads, with the same bits on each, so that all
    decide alike.
    """

    def __init__(self, works: Sequence[SequenceWork], pool: Pool, geometry: KvGeometry, ranks: Ranks) -> None:
        self._ranks = ranks
        self._evidence: dict[int, CheckEvidence] = {}
        self._taken = 0
        self._watched = [
            _Watched(
                index,
                work.pending.plan,
                torch.from_numpy(work.pending.witnesses),
                PagedKv(pool, work.block_ids, geometry),
                [],
            )
            for index, work in enumerate(works)
            if work.pending is not None and len(work.pending.witnesses)
        ]

    def __bool__(self) -> bool:
        return bool(self._watched)

    def take(self, end: int) -> None:
        """Copies the donors' KV of the layers below `end` that it has not copied yet. It has to lie in the pool, in the
        order of the current stream, and no forward may have written there."""
        for each in self._watched if end > self._taken else ():
            each.donor.append(token_rows(each.kv.layers(self._taken, end), each.positions))
        self._taken = max(self._taken, end)

    def restore(self) -> None:
        """Writes the donors' KV back, as if no forward had computed a witness."""
        for each in self._watched:
            put_token_rows(each.kv, each.positions, torch.cat(each.donor))

    def note(self, evidence: CheckEvidence) -> None:
        """Takes what a check of the iteration found."""
        self._evidence[evidence.request_id] = evidence

    def refused(self, sink: EvidenceSink | None) -> Iterator[tuple[int, SemanticKvPlan]]:
        """Behind the iteration's forwards, for which the host waits: the works whose witnesses deviate by more than the
        bounds, each with the plan by which it has to be run again.

        `sink` gets the evidence of all checks.
        """
        for each in self._watched:
            evidence = self._evidence[each.plan.request_id]
            deviations = self._ranks.total(token_squares(token_rows(each.kv, each.positions), torch.cat(each.donor)))
            # [layers, witnesses]
            found = relative(deviations).amax(1).cpu().numpy()[:, np.isin(each.positions.numpy(), evidence.witnesses)]
            check = each.plan.execution.check
            assert check is not None
            groups = np.array_split(found, len(check.witness_bounds))
            # One that is not a number stays one.
            largest = [float(group.max(initial=0.0)) for group in groups]
            evidence = replace(evidence, largest_witness=tuple(largest))
            holds = all(value <= bound for value, bound in zip(largest, check.witness_bounds, strict=True))
            if not holds:
                plan = each.plan.only_exact()
                reused = plan.reused_tokens
                evidence = replace(
                    evidence,
                    reused_tokens=reused,
                    recomputed_tokens=evidence.offered_tokens - reused,
                    largest_kept=0.0,
                    is_dropped=True,
                )
                yield each.index, plan
            self._evidence[evidence.request_id] = evidence
        if sink is not None:
            for evidence in self._evidence.values():
                sink(evidence)
