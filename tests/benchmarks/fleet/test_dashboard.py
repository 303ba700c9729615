"""The picture of the dashboard: every expression is asked, every panel drawn, and a real Prometheus understands all."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from benchmarks.fleet.dashboard import DOCS, Prometheus, draw, panel_lines, panels, prometheus, shown
from semblend_trt.metrics import Series

if TYPE_CHECKING:
    from pathlib import Path

BOARD = json.loads((DOCS / "dashboard.json").read_text(encoding="utf-8"))
TIMES = 1_000.0 + np.arange(5.0)


class OneSeries(Prometheus):
    """Answers every expression with one series, which misses the first moment, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, path: str, **fields: Any) -> Any:
        self.asked.append(fields["query"])
        labels = dict.fromkeys(("outcome", "kind", "reason", "worker"), "a label")
        values = [[moment, str(moment - TIMES[0])] for moment in TIMES[1:]]
        return {"result": [{"metric": labels, "values": values}]}


def test_every_expression_is_asked_and_every_panel_drawn() -> None:
    asked = OneSeries()
    found = {panel["id"]: panel_lines(asked, panel, TIMES) for panel in panels(BOARD)}
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    replaced = [each.replace("$__rate_interval", "15s").replace("$instance", ".*") for each in expressions]
    assert asked.asked == replaced
    figure = draw(BOARD, found)
    assert [axes.get_label() for axes in figure.axes] == [panel["title"] for panel in panels(BOARD)]
    texts = [text.get_text() for text in figure.texts]
    assert texts[1:] == [panel["title"] for panel in BOARD["panels"]]
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert legends == [name for panel in panels(BOARD) if panel["type"] != "stat" for name, _ in found[panel["id"]]]
    assert "a label" in legends
    assert [text.get_text() for text in figure.axes[3].texts] == ["4 s"]


def test_a_panel_without_an_answer_is_not_left_out() -> None:
    found = {panel["id"]: [] for panel in panels(BOARD)}
    assert {text.get_text() for axes in draw(BOARD, found).axes for text in axes.texts} == {"No data"}
    del found[7]
    with pytest.raises(KeyError):
        draw(BOARD, found)


def test_lines_of_zeros_are_drawn_as_one_and_lines_without_a_value_not_at_all() -> None:
    zero, nothing, some = np.zeros(3), np.full(3, np.nan), np.array([np.nan, 0.0, 2.0])
    assert [name for name, _ in shown([("a", zero), ("b", some), ("c", nothing), ("d", zero)])] == ["b", "2 others: 0"]
    assert [name for name, _ in shown([("a", zero), ("d", zero)])] == ["all 2: 0"]
    assert [name for name, _ in shown([("a", zero), ("b", some)])] == ["b", "a: 0"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="the program prometheus is not installed")
def test_a_real_prometheus_answers_every_expression(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Series(registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with prometheus(tmp_path, [f"127.0.0.1:{server.server_port}"]) as asked:
            (up,) = asked.ask("query", query="up")["result"]
            times = float(up["value"][0]) + np.arange(2.0)
            found = {panel["title"]: panel_lines(asked, panel, times) for panel in panels(BOARD)}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [name for name, _ in found["Donors"]] == ["donors", "approximate"]
    assert {name for name, _ in found["Bytes of donors"]} == {"host", "device", "disk"}
