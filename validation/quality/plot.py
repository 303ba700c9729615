"""Quality against computed share: one point an arm, the noise floor as a band."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from validation.arms import COLD, COLD_AGAIN
from validation.metrics import MARGIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.quality.samples import QualityLine

_PANEL_WIDTH, _HEIGHT, _DPI = 6.0, 5.0, 130
_MARKERS = "osD^vP*Xphd<>"


@dataclass(frozen=True, slots=True)
class Panel:
    """Families of one kind: `lines` has one for each arm, over all of them."""

    name: str
    lines: tuple[QualityLine, ...]

    def noise_floor(self) -> tuple[float, float] | None:
        """Exact match that differs from cold's by no more than a second cold run does, or by the margin."""
        scores = {line.arm: line.exact_match for line in self.lines}
        cold, again = scores.get(COLD), scores.get(COLD_AGAIN)
        if cold is None:
            return None
        spread = max(MARGIN, abs(cold - (cold if again is None else again)))
        return cold - spread, cold + spread


def draw(panels: Sequence[Panel], title: str) -> bytes:
    """A PNG with the panels that hold an exact match side by side."""
    shown = [panel for panel in panels if any(line.exact_match is not None for line in panel.lines)]
    figure = Figure(figsize=(_PANEL_WIDTH * max(1, len(shown)), _HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, max(1, len(shown)), squeeze=False)[0], shown, strict=False):
        _draw_panel(axes, panel)
    figure.suptitle(title, fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_panel(axes: Any, panel: Panel) -> None:
    floor = panel.noise_floor()
    if floor is not None:
        axes.axhspan(*floor, color="tab:green", alpha=0.2, label="noise floor and margin")
    points = [line for line in panel.lines if line.exact_match is not None]
    for index, line in enumerate(points):
        axes.plot(
            100 * line.computed_share,
            line.exact_match,
            _MARKERS[index % len(_MARKERS)],
            markersize=8,
            alpha=0.8,
            label=line.arm,
        )
    axes.set_title(f"{panel.name}, {max((line.samples for line in points), default=0)} prompts an arm", fontsize=9)
    axes.set_xlabel("computed, % of tokens x layers")
    axes.set_ylabel("exact match")
    axes.set_xlim(-3, 103)
    axes.set_ylim(-0.03, 1.05)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="best")
