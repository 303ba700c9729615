"""The dashboard and the alerts read series, labels and values that the code exports, and the dashboard all series."""

import json
import re
from collections import defaultdict

import promql_parser as promql
import pytest
import yaml

from semblend_trt.reasons import FAULTS, REASONS
from tests.pages import ROOT
from tests.test_metrics_page import exported, series

FOLDER = ROOT / "docs" / "grafana"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
GROUPS = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
SERIES = series() | series("vllm:")
# What Prometheus itself adds to every series.
TARGET = {"instance", "job"}
# The values of every label of the code, from all series together.
VALUES = defaultdict(set, reason=set(REASONS), fault=set(FAULTS))
for label, value in (each for metric in exported() for sample in metric.samples for each in sample.labels.items()):
    VALUES[label].add(value)


class Expression:
    """A PromQL expression, the `names` of its series and the `labels` of its result; it fails if a series lacks one."""

    def __init__(self, text):
        text = text.replace("$__rate_interval", "5m").replace("$instance", ".*")
        assert "$" not in text, "a variable that the dashboard does not have"
        self.names = set()
        self.labels = self._labels(promql.parse(text))

    def _labels(self, node):
        match node:
            case promql.MatrixSelector() | promql.VectorSelector():
                return self._selected(getattr(node, "vector_selector", node))
            case promql.AggregateExpr():
                kept = set(node.modifier.labels) if node.modifier else set()
                assert kept <= self._labels(node.expr), f"summed by what is not there: {node}"
                return kept
            case promql.BinaryExpr():
                return self._joined(node)
            case promql.Call():
                (vector,) = (each for each in node.args if not isinstance(each, promql.NumberLiteral))
                labels = self._labels(vector)
                if node.func.name != "histogram_quantile":
                    return labels
                assert "le" in labels, f"no buckets: {node}"
                return labels - {"le"}
            case promql.ParenExpr():
                return self._labels(node.expr)
            case promql.NumberLiteral():
                return set()
        raise AssertionError(f"not read by this test yet: {type(node).__name__}")

    def _selected(self, selector):
        base = re.sub(r"_(bucket|sum|count)$", "", selector.name)
        name = base if SERIES.get(base, ("",))[0] == "histogram" else selector.name
        assert name in SERIES, f"no code exports {selector.name}"
        kind, own = SERIES[name]
        assert (kind == "histogram") == (name != selector.name), f"a histogram has no series {selector.name}"
        labels = own | TARGET | ({"le"} if selector.name.endswith("_bucket") else set())
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
            if matcher.name not in TARGET:
                assert set(matcher.value.split("|")) <= VALUES[matcher.name], f"no such {matcher.name}: {matcher.value}"
        self.names.add(name)
        return labels

    def _joined(self, node):
        left, right = self._labels(node.lhs), self._labels(node.rhs)
        if promql.NumberLiteral in (type(node.lhs), type(node.rhs)):
            return left | right
        on, is_or = node.modifier and node.modifier.matching, str(node.op) == "or"
        # vLLM's series have more labels than ours: `or` has to say which are compared.
        assert set(on.labels) <= left & right if on else left == right and not is_or, f"the sides do not match: {node}"
        return left & right if is_or else left


@pytest.mark.promise("commands", "The dashboard shows every series, and...")
@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_read_what_is_exported(panel):
    for target in panel["targets"]:
        expression = Expression(target["expr"])
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == expression.labels
        for selector in re.findall(r"\{(.*?)\}", target["expr"]):
            assert 'instance=~"$instance"' in selector, f"not of the chosen instances: {target['expr']}"


@pytest.mark.promise("commands", "The dashboard shows every series, and...")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_rules_read_what_is_exported(rule):
    labels = Expression(rule["expr"]).labels
    told = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels
    assert "instance" in labels, "an alert names who it is about"
    assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.promise(
    "commands",
    "The dashboard shows every series, and its expressions and the alert rules' name only series, labels and values "
    "that exist",
)
def test_the_dashboard_shows_every_series():
    shown = {name for panel in PANELS for target in panel["targets"] for name in Expression(target["expr"]).names}
    assert shown == SERIES.keys()


def test_where_vllm_has_a_spelling_of_its_own_both_are_read():
    """Without PROMETHEUS_MULTIPROC_DIR a vLLM server shows its own spelling alone, and with it both."""
    twice = {name.removeprefix("vllm:") for name in SERIES if name.startswith("vllm:")}
    texts = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]
    for names in (Expression(text).names for text in texts):
        assert {f"vllm:{name}" for name in names & twice} == {name for name in names if name.startswith("vllm:")}
