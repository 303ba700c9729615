"""The loop over layers that every engine shares, and what the rows of one have to be able to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine_wrapper.course import Checkpoint, Course, Stage
    from semblend_trt.plan import CheckEvidence
    from semblend_trt.ranks import Ranks

LayerHook = Callable[[int], None]
EvidenceSink = Callable[["CheckEvidence"], None]
# Runs a course that begins within a layer, its tensors on the host, and returns its output rows; None where it cannot.
Rest = Callable[["Course", int], "torch.Tensor | None"]


class LayerRows(Protocol):
    """Rows between two layers of a decoder, over one pool."""

    def enter(self, stage: Stage) -> None:
        """Drops the rows that the stage does not keep."""

    def run(self, layer: int) -> None:
        """Runs a layer, or what is left of it behind a checkpoint."""

    def compare(self, checkpoint: Checkpoint, ranks: Ranks) -> torch.Tensor:
        """Begins the checkpoint's layer; returns deviations, as `Checkpoint.deviations`. All K and V are written."""

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows, int64; returns [len(rows), hidden]."""


def no_hook(layer: int) -> None:
    """In the place of a hook that nobody set."""


def follow(
    rows: LayerRows,
    course: Course,
    num_layers: int,
    ranks: Ranks,
    begun: int | None = None,
    before: LayerHook = no_hook,
    after: LayerHook = no_hook,
) -> torch.Tensor | None:
    """Runs a course that begins within layer `begun`, or at the lowest; returns what its checkpoint finds."""
    for stage, layers in course.layers_of_stages(num_layers):
        rows.enter(stage)
        for layer in layers:
            if layer != begun:
                before(layer)
            rows.run(layer)
            after(layer)
    if course.checkpoint is None:
        return None
    before(course.checkpoint.layer)
    return rows.compare(course.checkpoint, ranks)


def follow_all(
    rows: LayerRows,
    course: Course,
    num_layers: int,
    ranks: Ranks,
    sink: EvidenceSink | None = None,
    rest: Rest | None = None,
    before: LayerHook = no_hook,
    after: LayerHook = no_hook,
) -> torch.Tensor:
    """Runs all layers, from check to check, and tells `sink` what each found; returns the course's output rows.

    `rest` is asked after each check whether it runs what is left.
    """
    begun: int | None = None
    while True:
        found = follow(rows, course, num_layers, ranks, begun, before, after)
        if course.checkpoint is None or found is None:
            return rows.output(course.output_rows)
        begun = course.checkpoint.layer
        course, evidence = course.checkpoint.decide(found)
        if sink is not None:
            for each in evidence:
                sink(each)
        output = None if rest is None else rest(course, begun)
        if output is not None:
            return output
        course = course.to(found.device)
