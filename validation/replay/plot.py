"""Hit share and predicted TTFT against capacity, one line a policy."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from validation.replay.simulation import OPTIMUM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.replay.figures import Line

_PANEL_WIDTH, _PANEL_HEIGHT, _DPI = 6.0, 4.0, 130
_MARKERS = "osD^vPX"


def draw(lines: Sequence[Line], title: str) -> bytes:
    """A PNG: a column for each rule of reuse, hit share above and the 95th percentile of the predicted TTFT below."""
    rules = list(dict.fromkeys(line.rule for line in lines))
    figure = Figure(figsize=(_PANEL_WIDTH * len(rules), 2 * _PANEL_HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    shares, times = figure.subplots(2, len(rules), squeeze=False, sharex="col", sharey="row")
    for column, rule in enumerate(rules):
        chosen = [line for line in lines if line.rule == rule]
        _draw_panel(shares[column], chosen, lambda line: 100 * line.hit_share)
        _draw_panel(times[column], chosen, lambda line: line.ttft_p95_ms)
        shares[column].set_title(rule, fontsize=9)
        times[column].set_xlabel("capacity, tokens")
    shares[0].set_ylabel("reused, % of the prompts' tokens")
    times[0].set_ylabel("TTFT predicted by the model, p95 in ms")
    shares[0].legend(fontsize=7, loc="best")
    figure.suptitle(title, fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_panel(axes: Any, lines: Sequence[Line], value: Any) -> None:
    for index, policy in enumerate(dict.fromkeys(line.policy for line in lines)):
        points = sorted((line.capacity_tokens, value(line)) for line in lines if line.policy == policy)
        style = "k--" if policy == OPTIMUM else "-"
        axes.plot(*zip(*points, strict=True), style, marker=_MARKERS[index % len(_MARKERS)], alpha=0.8, label=policy)
    axes.set_xscale("log")
    capacities = sorted({line.capacity_tokens for line in lines})
    axes.set_xticks(capacities, [f"{each:,}" for each in capacities])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
