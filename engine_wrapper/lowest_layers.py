"""Runs the lowest layers of a plan in several forwards, where they compute more rows than one forward may have.

One forward takes every row that is compared, or that leaves before the last layer, through the layers below; its check
decides between two of them (see `engine_wrapper.portions`). Where these rows are too many, their lowest layers run
first, part by part in the order of positions: each part attends to what those before it have left in the pool, so that
it writes and finds the same. The check decides once, over all parts. Rows that leave are then done; the others enter
layer 0 again, since nobody has made room for the hidden rows of all parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine_wrapper.layer_loop import EvidenceSink
    from engine_wrapper.sequence_work import SequenceWork

# Runs all rows of a work up to K and V of a layer, as `engine_wrapper.course.lowest_course` has it. Returns the
# deviations of its checked tokens, float32 [tokens].
RunLowest = Callable[["SequenceWork", int], torch.Tensor]


def settled(
    work: SequenceWork, num_layers: int, max_rows: int | None, run: RunLowest, evidence_sink: EvidenceSink | None
) -> SequenceWork:
    """What is left of `work` once `portions` can divide it into forwards of at most `max_rows` rows, None for any.

    Most works can be divided as they are, and nothing runs. Otherwise `run` gets their parts, and `evidence_sink` is
    told what the check found; the host waits for the device there.
    """
    # Rows of cold requests and of decode steps are counted only: this runs in every iteration.
    while max_rows is not None and len(work.positions) > max_rows <= len(rows := work.together(num_layers)):
        layer = _lowest_layer(work)
        starts = range(0, rows.stop, max_rows)
        parts = [work.part(start, min(start + max_rows, rows.stop), 0) for start in starts]
        deviations = [run(part, layer) for part in parts]
        if work.open_check is not None:
            work, evidence = work.decide(torch.cat(deviations).cpu().numpy())
            if evidence_sink is not None:
                evidence_sink(evidence)
        work = work.beyond(layer, num_layers)
    return work


def _lowest_layer(work: SequenceWork) -> int:
    """The layer in which rows are compared, else the last one that the first rows to leave are computed in."""
    return int(work.drops_at.min()) - 1 if work.open_check is None else work.open_check.check.layer
