"""Draws docs/grafana/dashboard.png: what the dashboard's own queries give over a real Prometheus.

`python -m benchmarks.fleet.dashboard` needs the program `prometheus`. The soak's router, worker and load run for
90 s, and every few requests the worker alone is asked for a receipt. Prometheus scrapes both every second and answers
every expression of docs/grafana/dashboard.json, with its variables replaced. Each panel stands at its own place with
its own title, unit, range and legend, as far as the file says them; colours and fonts are not Grafana's.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import random
import subprocess
import tempfile
import time
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter
from PIL import Image

from benchmarks.fleet.server import free_port
from benchmarks.fleet.soak import Load, Soak, soaked_fleet
from semblend_trt.fleet.router.cold_runs import VERIFY_HEADER
from validation.documents import stock_list
from validation.prompts import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.ticker import Formatter

DOCS = Path(__file__).parents[2] / "docs" / "grafana"
SECONDS, STEP_SECONDS, START_SECONDS, RECEIPT_EVERY = 90.0, 1, 30.0, 4
VARIABLES = {"$__rate_interval": "15s", "$instance": ".*"}
# As Grafana writes the units of the file.
UNITS: dict[str, Callable[[], Formatter]] = {
    "percentunit": lambda: PercentFormatter(1.0),
    "s": lambda: EngFormatter("s"),
    "reqps": lambda: FuncFormatter(lambda value, _: f"{value:g} req/s"),
    "ops": lambda: FuncFormatter(lambda value, _: f"{value:g} ops/s"),
    "cps": lambda: FuncFormatter(lambda value, _: f"{value:g} c/s"),
    "bytes": lambda: FuncFormatter(lambda value, _: f"{value / 2**20:.3g} MiB"),
    "short": lambda: FuncFormatter(lambda value, _: f"{value:,g}"),
}
# Inches of a unit of gridPos, of a line of text, of a panel's margins; and letters in an inch of a legend.
ACROSS, DOWN, LINE, LEFT, MARGIN, GAP, LETTERS = 0.54, 0.29, 0.13, 0.62, 0.1, 0.03, 15.0
LEGEND: dict[str, Any] = {
    "fontsize": 6.5,
    "frameon": False,
    "borderaxespad": 0,
    "borderpad": 0,
    "labelspacing": 0.3,
    "columnspacing": 1.0,
    "handlelength": 1.0,
    "handletextpad": 0.4,
}

# One series of an answer: its legend, and its values at all times, NaN where there is none.
Line = tuple[str, "npt.NDArray[np.float64]"]


class Prometheus:
    """A running Prometheus at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **fields: Any) -> Any:
        """The `data` of an answer of its API. Raises HTTPError for an expression that it does not understand."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urlencode(fields)}") as answer:
            return json.load(answer)["data"]

    def lines(self, target: dict[str, Any], times: npt.NDArray[np.float64]) -> list[Line]:
        """What a panel's target gives at `times` (seconds since the epoch, STEP_SECONDS apart)."""
        expression = target["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        found = self.ask("query_range", query=expression, start=times[0], end=times[-1], step=STEP_SECONDS)["result"]
        lines = []
        for series in found:
            values = np.full(len(times), np.nan)
            for moment, value in series["values"]:
                values[round((moment - times[0]) / STEP_SECONDS)] = float(value)
            legend = target["legendFormat"]
            for label, named in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", named)
            lines.append((legend, values))
        return lines


@contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `targets` (`host:port`) every second; its data lies in `folder`.

    Raises FileNotFoundError where the program is not installed, RuntimeError where it does not start.
    """
    config, log, address = folder / "prometheus.yml", folder / "prometheus.log", f"127.0.0.1:{free_port()}"
    scraped = [{"job_name": "semblend", "static_configs": [{"targets": list(targets)}]}]
    # JSON is YAML.
    config.write_text(json.dumps({"global": {"scrape_interval": f"{STEP_SECONDS}s"}, "scrape_configs": scraped}))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as said:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=said, stderr=said)
    try:
        found, deadline = Prometheus(f"http://{address}"), time.monotonic() + START_SECONDS
        while not _has_scraped(found, len(targets)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus did not scrape within {START_SECONDS:g} s: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield found
    finally:
        process.kill()
        process.wait()


def _has_scraped(found: Prometheus, targets: int) -> bool:
    try:
        return len(found.ask("query", query="up == 1")["result"]) == targets
    except OSError:
        return False


def measured(folder: Path, seconds: float, board: dict[str, Any]) -> dict[int, list[Line]]:
    """Serves the load for so long; gives every panel's lines by the panel's id."""
    variables = {"SEMBLEND_EMBEDDER": "static", "SEMBLEND_AUDIT_PATH": str(folder / "audit.jsonl")}
    with soaked_fleet(folder, variables) as processes:
        addresses = {name: each.address() for name, each in processes.items()}
        with prometheus(folder, [each.removeprefix("http://") for each in addresses.values()]) as asked:
            began, seen = time.time(), Soak()
            receipts = _receipts(addresses["worker"])
            with closing(Load(addresses["router"], seen)) as load:
                for turn in itertools.takewhile(lambda _: time.time() < began + seconds, itertools.count()):
                    load.turn()
                    if turn % RECEIPT_EVERY == 0:
                        next(receipts)
            print(f"{dict(seen.counts)}, {len(seen.faults)} wrong or missing")
            times = began + np.arange(0.0, seconds, STEP_SECONDS)
            return {panel["id"]: panel_lines(asked, panel, times) for panel in panels(board)}


def _receipts(url: str) -> Iterator[None]:
    """Asks a worker for a receipt at each step: the same documents in another order, with another question."""
    generator = random.Random(1)
    documents = [stock_list(generator, 8) for _ in range(4)]
    while True:
        generator.shuffle(documents)
        question = generator.choice(documents[0].questions).text
        prompt = render("Answer briefly.", [each.text for each in documents], question)
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {VERIFY_HEADER: "cold"})
        with urllib.request.urlopen(request) as answer:
            answer.read()
        yield


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a dashboard that show data; the others are the titles of its rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_lines(asked: Prometheus, panel: dict[str, Any], times: npt.NDArray[np.float64]) -> list[Line]:
    """The lines of all targets of a panel at `times`."""
    return [line for target in panel["targets"] for line in asked.lines(target, times)]


def shown(lines: list[Line]) -> list[Line]:
    """The lines that a panel draws: those with a value, and those that are 0 throughout as one."""
    valued = [line for line in lines if np.isfinite(line[1]).any()]
    drawn = [line for line in valued if np.nanmax(np.abs(line[1]))]
    zero = [line for line in valued if not np.nanmax(np.abs(line[1]))]
    if zero:
        told = zero[0][0] if len(zero) == 1 else f"{len(zero)} others" if drawn else f"all {len(zero)}"
        drawn.append((f"{told}: 0", zero[0][1]))
    return drawn


def draw(board: dict[str, Any], found: dict[int, list[Line]]) -> Figure:
    """The dashboard with every panel's lines, by the panel's id. Raises KeyError for a panel or a unit without."""
    places = [panel["gridPos"] for panel in board["panels"]]
    width = ACROSS * max(at["x"] + at["w"] for at in places)
    height = DOWN * (1 + max(at["y"] + at["h"] for at in places))
    figure = Figure(figsize=(width, height))
    titled = f"{board['title']}: dashboard.json's own queries over a real Prometheus, drawn with matplotlib"
    figure.text(MARGIN / width, 1 - MARGIN / height, titled, fontsize=10, va="top")
    for panel in board["panels"]:
        at = panel["gridPos"]
        # Inches from the lower left corner; the first line is the picture's title.
        x, y = ACROSS * at["x"], height - DOWN * (1 + at["y"] + at["h"])
        wide, high = ACROSS * at["w"], DOWN * at["h"]
        corner = (x + MARGIN) / width, (y + high - MARGIN) / height
        size = 10.5 if panel["type"] == "row" else 8.5
        figure.text(*corner, panel["title"], fontsize=size, va="top", weight="bold")
        if panel["type"] == "row":
            continue
        frame = ((x + GAP) / width, (y + GAP) / height), (wide - 2 * GAP) / width, (high - 2 * GAP) / height
        figure.add_artist(Rectangle(*frame, fill=False, edgecolor="0.8", linewidth=0.8))
        _panel(figure, panel, shown(found[panel["id"]]), (x, y, wide, high))
    return figure


def _panel(figure: Figure, panel: dict[str, Any], lines: list[Line], box: tuple[float, float, float, float]) -> None:
    """Draws the lines of a panel and their legend in its box: left, bottom, width and height in inches."""
    (x, y, wide, high), (width, height) = box, figure.get_size_inches()
    is_stat = panel["type"] == "stat"
    columns = max(1, int((wide - MARGIN) * LETTERS / (5 + max((len(name) for name, _ in lines), default=0))))
    below = 0.0 if is_stat else LINE * math.ceil(len(lines) / columns) + 2.5 * LINE
    across = (wide - LEFT - 2 * MARGIN) / width
    axes = figure.add_axes(((x + LEFT) / width, (y + below) / height, across, (high - below - 2.2 * LINE) / height))
    axes.set_label(panel["title"])
    values = panel["fieldConfig"]["defaults"]
    axes.yaxis.set_major_formatter(UNITS[values["unit"]]())
    if is_stat or not lines:
        told = axes.yaxis.get_major_formatter()(lines[0][1][np.isfinite(lines[0][1])][-1]) if lines else "No data"
        axes.set_axis_off()
        axes.text(0.45, 0.5, told, fontsize=20 if is_stat else 10, ha="center", va="center", transform=axes.transAxes)
        return
    _plot(axes, values, lines)
    corner = ((x + MARGIN) / width, (y + MARGIN) / height)
    figure.legend(*axes.get_legend_handles_labels(), loc="lower left", bbox_to_anchor=corner, ncol=columns, **LEGEND)


def _plot(axes: Axes, values: dict[str, Any], lines: list[Line]) -> None:
    """Draws lines over seconds as a panel's `defaults` say: its range, stacked or not."""
    times = STEP_SECONDS * np.arange(len(lines[0][1]))
    custom = values.get("custom", {})
    names, drawn = [name for name, _ in lines], [each for _, each in lines]
    if "stacking" in custom:
        axes.stackplot(times, *map(np.nan_to_num, drawn), labels=names, alpha=custom["fillOpacity"] / 100)
        axes.set_prop_cycle(None)
        drawn = list(np.cumsum([np.nan_to_num(each) for each in drawn], axis=0))
    for name, each in zip(names, drawn, strict=True):
        axes.plot(times, each, label=None if "stacking" in custom else name, linewidth=1.1)
    top = max(float(np.nanmax(each)) for each in drawn)
    axes.set_ylim(values["min"], values.get("max", 1.1 * top or 1.0))
    axes.set_xlim(0, times[-1])
    if values["unit"] == "bytes":
        axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(top / 3 or 1))))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda second, _: f"{second:g} s"))
    axes.tick_params(labelsize=6.5, length=2, pad=2)
    axes.grid(color="0.92", linewidth=0.6)
    axes.spines[:].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, serves, asks and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"how long; {SECONDS:g} unless told")
    parser.add_argument("--png", type=Path, default=DOCS / "dashboard.png", help="the picture's file")
    given = parser.parse_args(arguments)
    board = json.loads((DOCS / "dashboard.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="dashboard-") as folder:
        found = measured(Path(folder), given.seconds, board)
    image = io.BytesIO()
    draw(board, found).savefig(image, format="png")
    # A palette halves the file.
    Image.open(image).convert("RGB").quantize(128).save(given.png, optimize=True)


if __name__ == "__main__":
    main()
