"""`python -m validation quality-plot`: exact match on traps against what is computed, drawn from result rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable, write_bytes
from validation import arguments, scoreboard
from validation.arms import BOUNDARY, COLD, COLD_AGAIN, POSITION_FIX, VERIFIED, is_reusing
from validation.metrics import MARGIN
from validation.output import png, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

FILE_STEM = "quality"
EM_ON_TRAPS, COMPUTED_ON_TRAPS = "trap_em", "trap_computed_share"

_DESCRIPTION = """
Draws exact match on traps against the share of tokens times layers that is computed: a panel for each run, one point
an arm, and the noise floor as a band. Reads the result rows that `quality --record` wrote, and serves nothing.
"""
_REFERENCES = "cold and exact prefix"
# Marker and colour by what stands in front of an arm's number.
_STYLES = {
    _REFERENCES: ("o", "0.35"),
    POSITION_FIX: ("v", "tab:red"),
    "epic": ("P", "tab:orange"),
    "cacheblend": ("D", "tab:purple"),
    BOUNDARY: ("s", "tab:blue"),
    VERIFIED: ("*", "tab:green"),
}
_WIDTH, _HEIGHT, _DPI = 4.6, 3.6, 130


@dataclass(frozen=True, slots=True)
class Point:
    """One arm: `exact_match`, 0 to 1, and `computed_share`, tokens times layers of all behind the exact prefix."""

    arm: str
    exact_match: float
    computed_share: float


def parse_quality_plot(given: Sequence[str]) -> argparse.Namespace:
    """Arguments of `quality-plot`; exits with status 2 for any that argparse refuses."""
    parser = arguments.Parser("quality-plot", _DESCRIPTION)
    told = "result rows as `quality --record` names them; panels have this order"
    parser.add_argument("rows", type=Path, nargs="+", metavar="quality_NAME.json", help=told)
    parser.add_argument("--plot", type=Path, default=Path("docs/quality.png"), help="PNG plot")
    return parser.parse_args(given)


def run_quality_plot(options: argparse.Namespace, command: str) -> bool:  # noqa: ARG001 - as all commands are run
    """Draws and writes the plot. Raises SemBlendError and OSError."""
    check_writable(options.plot)
    panels = {path.stem.removeprefix(FILE_STEM).lstrip("_") or path.stem: points_of(path) for path in options.rows}
    write_bytes(options.plot, draw(panels, "Exact match on traps"))
    say(options.plot)
    return True


def points_of(path: Path) -> list[Point]:
    """The arms of one run on its traps. Raises ConfigurationError for a file without rows of them."""
    suffix = path.stem.removeprefix(FILE_STEM)
    values = {row.name: row.value for row in scoreboard.rows_of(path)}
    start = f"{EM_ON_TRAPS}{suffix}_"
    scores = {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
    if not scores:
        raise ConfigurationError(f"{path} has no row {start}ARM; make the file with `quality --record`.")
    # An arm that reuses nothing has no row of what it computes, which is all.
    return [Point(arm, score, values.get(f"{COMPUTED_ON_TRAPS}{suffix}_{arm}", 1.0)) for arm, score in scores.items()]


def noise_floor(points: Sequence[Point]) -> tuple[float, float] | None:
    """The range of exact match around cold's: as wide as the difference of a second cold run, or as the margin."""
    scores = {point.arm: point.exact_match for point in points}
    if (cold := scores.get(COLD)) is None:
        return None
    spread = max(MARGIN, abs(cold - scores.get(COLD_AGAIN, cold)))
    return cold - spread, cold + spread


def draw(panels: Mapping[str, Sequence[Point]], title: str) -> bytes:
    """Exact match against computed share, as a PNG: panels under their titles that share their axes, one point an arm
    with its number beside it, the noise floor as a band."""
    # Up to three stand in one row.
    columns = max(1, len(panels) if len(panels) < 4 else math.ceil(math.sqrt(len(panels))))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows + 0.6), dpi=_DPI, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    handles: dict[str, Artist] = {}
    for index, (name, points) in enumerate(panels.items()):
        axes = grid.flat[index]
        _draw_panel(axes, name, points)
        if index + columns >= len(panels):
            axes.set_xlabel("computed, % of tokens x layers", fontsize=9)
            axes.tick_params(labelbottom=True)
        if index % columns == 0:
            axes.set_ylabel("exact match", fontsize=9)
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    if handles:
        width = min(len(handles), 3 * columns)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=width, fontsize=8)
    return png(figure, title)


def _draw_panel(axes: Axes, title: str, points: Sequence[Point]) -> None:
    if (floor := noise_floor(points)) is not None:
        axes.axhspan(*floor, color="tab:green", alpha=0.2, label="noise floor and margin")
    for point in points:
        name, _, number = point.arm.rpartition("_")
        policy, number = (name, number) if number.isdecimal() else (point.arm, "")
        policy = policy if is_reusing(point.arm) else _REFERENCES
        marker, colour = _STYLES[policy]
        place = (100 * point.computed_share, point.exact_match)
        axes.plot(*place, marker, color=colour, markersize=12 if policy == VERIFIED else 8, alpha=0.8, label=policy)
        axes.annotate(number, place, xytext=(5, 5), textcoords="offset points", fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.set(xlim=(-3, 103), ylim=(-0.03, 1.05))
    axes.grid(alpha=0.3)
