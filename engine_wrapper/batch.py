"""The sequences of one forward as an engine scheduled them, and the forwards that run them once plans add rows.

A plan may compute more tokens than the engine has scheduled. So an iteration is divided by position into forwards of
bounded size (micro-batches): each part attends to the KV that the parts before it have written.

The samples of checks have a forward of their own. What they most likely leave runs before it.

Rows that are compared, or that leave before the last layer, stay in one forward. If they are too many, their lowest
layers run first, part by part, and the check decides once, over all parts. The rows that go on enter layer 0 again,
because the parts' hidden rows are not kept."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine_wrapper.deviation_check import share_for
from engine_wrapper.layer_schedule import MASS_ROWS, AttentionMass, lowest_schedule, schedule_of
from engine_wrapper.token_schedule import SequenceSlice, SequenceWork, works_of
from kernels.device import HostCopy
from kernels.layout import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule
    from kernels.layout import KvGeometry
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan
    from semblend_trt.ranks import Ranks

# At most this many rows run before a sample is read: if it fails, they are computed again.
MAX_SPECULATIVE_ROWS = 512


class Part(NamedTuple):
    """Rows of one work, by index `owner`, in one forward. If none is `scheduled`, its output row is not used."""

    work: SequenceWork
    owner: int
    scheduled: int


def micro_batches(works: Sequence[SequenceWork], num_layers: int | None, max_rows: int | None) -> list[list[Part]]:
    """Divide `works` into as few forwards of at most `max_rows` rows as possible; None puts them into one.

    A forward is larger only if rows that stay together, with one row after them, are more than `max_rows`. Without
    `num_layers` no rows stay together."""
    found: list[list[Part]] = [[]]
    for owner, work in enumerate(works):
        rest = work
        while True:
            rows = len(rest.positions)
            room = rows if max_rows is None else max_rows - sum(len(part.work.positions) for part in found[-1])
            end = rows
            if rows > room:
                together = range(0) if num_layers is None else rest.together(num_layers)
                end = together.start if together.start < room <= together.stop else max(0, room)
            if not end and found[-1]:
                found.append([])
                continue
            # If not even an empty forward can take a part of the rows, it takes all of them.
            if end in (0, rows):
                found[-1].append(Part(rest, owner, rest.outputs))
                break
            scheduled = max(0, end - (rows - rest.outputs))
            found[-1].append(Part(rest.part(0, end, max(1, scheduled)), owner, scheduled))
            rest = rest.part(end, rows, rest.outputs - scheduled)
    return found


@dataclass(slots=True)
class LastSamples:
    """Whether all samples passed in an engine's last forward that had some. The next ones most likely end alike."""

    have_passed: bool = True


@dataclass(frozen=True, slots=True)
class EngineForward:
    """How one engine runs a schedule of at most `max_rows` rows on its device.

    `run` returns the output rows, [rows, hidden], and gives the checks' evidence to a sink and queries to the
    schedule's `mass`. `ranks` share the heads. `lowest` runs a schedule up to its check and returns the deviations.
    `keys_per_row`: as for `works_of`. `few_rows`: up to this number rows run faster in a new forward than layer by
    layer."""

    geometry: KvGeometry
    ranks: Ranks
    run: Callable[[LayerSchedule, EvidenceSink | None], torch.Tensor]
    lowest: Callable[[LayerSchedule], torch.Tensor]
    max_rows: int | None = None
    keys_per_row: int = 0
    few_rows: int = 0
    last_samples: LastSamples = field(default_factory=LastSamples)

    def hidden(
        self,
        works: Sequence[SequenceWork],
        device: torch.device,
        sink: EvidenceSink | None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the forwards that `works` need; return the hidden rows of their outputs, [rows, hidden].

        `input_ids`: [rows], the tokens of these rows if the engine knows them on its device alone. Few rows are left if
        every sample passes. If the last samples did, they run before the host has read these. If one fails, others
        write over theirs."""

        def run(left: Sequence[SequenceWork]) -> torch.Tensor:
            divided = [self._above_lowest(work, device) for work in self._decided(left, device, sink)]
            return self.outputs(divided, device, sink, input_ids)

        compared = {index: found for index, work in enumerate(works) if len(found := work.sampled_tokens())}
        if not compared:
            return run(works)
        queued = self._queue_samples(works, compared, device)
        expected = [work.if_all_is_kept() if index in compared else work for index, work in enumerate(works)]
        may_pass = all(work.pending is None or _least_share(work) == 0.0 for work in works)
        is_likely = self.last_samples.have_passed and may_pass and all(work.pending is None for work in expected)
        is_short = sum(len(work.positions) for work in expected) <= MAX_SPECULATIVE_ROWS
        speculative = run(expected) if is_likely and is_short else None
        # If every sample that passes asks for a share, the attention is found while the host reads the samples.
        surely = {index: expected[index] for index in compared if _least_share(works[index])}
        masses = self.attention(surely, device, input_ids)
        left, known = list(works), dict[int, "CheckEvidence | None"]()
        for indices, deviations in queued:
            parts = _split(deviations.read(), [len(compared[index]) for index in indices])
            for index, own in zip(indices, parts, strict=True):
                left[index], known[index] = works[index].after_sample(compared[index], own)
        asked = [index for index, work in enumerate(left) if work.pending is not None and work.pending.share]
        further = {index: expected[index] for index in asked if index not in masses}
        masses |= self.attention(further, device, input_ids)
        for index in asked:
            left[index], known[index] = left[index].weighed(masses[index].read())
        for evidence in known.values():
            if evidence is not None and sink is not None:
                sink(evidence)
        passed = [len(own.positions) == len(kept.positions) for own, kept in zip(left, expected, strict=True)]
        self.last_samples.have_passed = all(passed)
        return speculative if all(passed) and speculative is not None else run(left)

    def _queue_samples(
        self, works: Sequence[SequenceWork], compared: Mapping[int, npt.NDArray[np.int64]], device: torch.device
    ) -> list[tuple[list[int], HostCopy]]:
        """Run the samples of works together; return their deviations on the way to the host, with the works' indices
        for each layer that compares."""
        return [
            (own, HostCopy(self._compare([works[index].sample(compared[index]) for index in own], layer, device)))
            for layer, own in _by_layer(works, compared).items()
        ]

    def attention(
        self, works: Mapping[int, SequenceWork], device: torch.device, input_ids: torch.Tensor | None = None
    ) -> dict[int, HostCopy]:
        """Run works without a check. Return for each the attention that its last MASS_ROWS rows give to its tokens,
        float32 [tokens], over all heads of all ranks."""
        num_layers, found, numbers = self.geometry.num_layers, dict[int, torch.Tensor](), list(works)
        after = [len(work.positions) for work in works.values()]
        for parts in micro_batches(list(works.values()), num_layers, self.max_rows) if works else ():
            counts = []
            for part in parts:
                rows = len(part.work.positions)
                after[part.owner] -= rows
                counts.append(max(0, min(MASS_ROWS - after[part.owner], rows)))
            own = [part.work for part in parts]
            mass = AttentionMass(own, counts, num_layers) if any(counts) else None
            self.run(replace(_moved(schedule_of(own, num_layers), device, input_ids), mass=mass), None)
            reading = [numbers[part.owner] for part, count in zip(parts, counts, strict=True) if count]
            for number, total in zip(reading, () if mass is None else mass.totals(self.ranks), strict=True):
                if (earlier := found.get(number)) is not None:
                    total[: len(earlier)] += earlier
                found[number] = total
        return {number: HostCopy(total) for number, total in found.items()}

    def _decided(
        self, works: Sequence[SequenceWork], device: torch.device, sink: EvidenceSink | None
    ) -> list[SequenceWork]:
        """Return works after the checks that lowest layers decide alone: those of too many rows for a forward, and all
        if few rows are certain to go on. `sink` gets the evidence, and the host waits."""
        left, num_layers = list(works), self.geometry.num_layers
        checked = {index: sum(work.pending.lengths) for index, work in enumerate(works) if work.pending is not None}
        are_few = sum(len(work.positions) for work in works) - sum(checked.values()) <= self.few_rows
        deciding = [index for index in checked if are_few or self._is_long(works[index])]
        for layer, own in _by_layer(works, deciding).items():
            found = self._compare([works[index].lowest_rows(num_layers) for index in own], layer, device)
            parts = _split(found.cpu().numpy(), [checked[index] for index in own])
            for index, deviations in zip(own, parts, strict=True):
                work, evidence = works[index].decide(deviations)
                left[index] = work.above(layer, num_layers)
                if sink is not None:
                    sink(evidence)
        return left

    def _is_long(self, work: SequenceWork) -> bool:
        """Return whether more rows have to stay together than a forward takes."""
        most = self.max_rows
        return most is not None and len(work.positions) > most <= len(work.together(self.geometry.num_layers))

    def _above_lowest(self, work: SequenceWork, device: torch.device) -> SequenceWork:
        """Return `work`, or its rest once the lowest layers of its parts have run, such that it can be divided."""
        num_layers = self.geometry.num_layers
        while self._is_long(work):
            layer = _layer_of(work)
            self._compare([work.lowest_rows(num_layers)], layer, device)
            work = work.above(layer, num_layers)
        return work

    def _compare(self, works: Sequence[SequenceWork], layer: int, device: torch.device) -> torch.Tensor:
        """Run the lowest layers of all rows; return the deviations of the checked ones, float32, on the device."""
        batches = ([part.work for part in parts] for parts in micro_batches(works, None, self.max_rows))
        num_layers = self.geometry.num_layers
        return torch.cat([self.lowest(lowest_schedule(own, layer, num_layers).to(device)) for own in batches])

    def outputs(
        self,
        works: Sequence[SequenceWork],
        device: torch.device,
        sink: EvidenceSink | None,
        input_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run works of which nothing is left to be decided, `max_rows` at a time; return the rows of their outputs."""
        num_layers, hidden, done = self.geometry.num_layers, [], 0
        for parts in micro_batches(works, num_layers, self.max_rows):
            end = done + sum(part.scheduled for part in parts)
            schedule = _moved(schedule_of([part.work for part in parts], num_layers), device, input_ids)
            if input_ids is not None:
                _fill(schedule.token_ids, parts, input_ids[done:end])
            own = self.run(schedule, sink)
            asked = np.repeat([part.scheduled > 0 for part in parts], [part.work.outputs for part in parts])
            if not asked.all():
                own = own.index_select(0, to_device(torch.from_numpy(np.flatnonzero(asked)), own.device))
            hidden.append(own)
            done = end
        return torch.cat(hidden) if len(hidden) > 1 else hidden[0]


def _least_share(work: SequenceWork) -> float | None:
    """Return the share of the checked tokens that is computed if none deviates."""
    assert work.pending is not None
    return share_for(work.pending.check, 0.0)


def _split(values: npt.NDArray[np.float32], counts: Sequence[int]) -> list[npt.NDArray[np.float32]]:
    """Return parts of `values` of these lengths."""
    return np.split(values, np.cumsum(counts)[:-1])


def _by_layer(works: Sequence[SequenceWork], indices: Iterable[int]) -> dict[int, list[int]]:
    """Return indices of works by the layer in which their rows are compared."""
    found = dict[int, list[int]]()
    for index in indices:
        found.setdefault(_layer_of(works[index]), []).append(index)
    return found


def _layer_of(work: SequenceWork) -> int:
    """Return the layer in which rows are compared, else the last one before rows leave."""
    return int(work.drops_at.min()) - 1 if work.pending is None else work.pending.check.layer


def _moved(schedule: LayerSchedule, device: torch.device, input_ids: torch.Tensor | None) -> LayerSchedule:
    """Return the schedule on the device, with tokens of the dtype of `input_ids`."""
    schedule = schedule.to(device)
    return schedule if input_ids is None else replace(schedule, token_ids=schedule.token_ids.to(input_ids.dtype))


def _fill(tokens: torch.Tensor, parts: Sequence[Part], input_ids: torch.Tensor) -> None:
    """Write the scheduled tokens of `parts`, which are after the plan's rows of each sequence, into a forward's."""
    if len(parts) == 1:  # most often: nothing has to be copied to the device
        tokens[len(tokens) - len(input_ids) :] = input_ids
        return
    ends = np.cumsum([len(part.work.positions) for part in parts])
    rows = [np.arange(last - part.scheduled, last) for last, part in zip(ends, parts, strict=True)]
    tokens[to_device(torch.from_numpy(np.concatenate(rows)), tokens.device)] = input_ids


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one forward: request id, first position and number of tokens of each; `contexts` come first.
    `input_ids`: [tokens], on the engine's device; the newest tokens are known only there."""

    request_ids: tuple[int, ...]
    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    contexts: int
    input_ids: torch.Tensor

    def run(
        self,
        plans: Mapping[int, SemanticKvPlan],
        blocks: list[list[int]],
        forward: EngineForward,
        evidence_sink: EvidenceSink | None = None,
    ) -> torch.Tensor:
        """Run the forwards that are needed; return the hidden rows that the engine scheduled, [tokens, hidden].

        `plans` by request id; `blocks`: every request's block ids. Raises PlanError if a plan does not fit its request,
        ValueError if a block is missing."""
        slices = []
        for request_id, begin, length, held in zip(self.request_ids, self.begins, self.lengths, blocks, strict=True):
            plan, end = plans.get(request_id), begin + length
            # Without a plan the tokens are not read.
            tokens = (0,) * length if plan is None else tuple(plan.prompt_token_ids[begin:end].tolist())
            own = held[: forward.geometry.blocks_for(end)]
            slices.append(SequenceSlice(request_id, begin, tokens, tuple(own), plan))
        works = works_of(slices, forward.geometry.num_layers, forward.keys_per_row)
        return forward.hidden(works, self.input_ids.device, evidence_sink, self.input_ids)


# CPython (3.11 on) maps and unmaps memory at each call across the end of a 16 KB chunk of its stack: 35 us a layer, if
# a forward is as deep (H200; `_PyThreadState_PushFrame`). A frame of 64 KB begins a chunk, with room for all below it.
Batch.run.__code__ = Batch.run.__code__.replace(co_stacksize=1 << 13)
