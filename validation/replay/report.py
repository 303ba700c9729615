"""A replay's findings as a JSON document, a CSV table, a Markdown page and tables for the terminal."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from rich.table import Table

from validation.replay.figures import Line
from validation.replay.interval import CONFIDENCE, RESAMPLES
from validation.replay.simulation import OPTIMUM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.results import Measured
    from validation.replay.interval import Interval
    from validation.replay.latency import LatencyModel
    from validation.replay.simulation import ReuseRule

SCHEMA = 1
_INTERVALS = ("hit_share_over_lru", "ttft_over_lru_ms")
_HEADINGS = (
    "policy | capacity | reused | saved tokens | TTFT p50 | p95 | p99 | extrapolated | evicted | regrets | "
    "reused - lru, points | mean TTFT - lru"
)
_NOTES = f"""
All times are **predicted by the model**, in ms; none is measured. One cache serves the whole trace, as if there were
one replica: one request after the other in the order of their times, each whole before the next, without the time in a
queue. A block is shared as a whole or not at all, never with another tenant or model, and each held block is one donor
to the policy; a connector keeps whole prompts as donors. No block of a request goes while it is served. Every reused
token costs the same, whether exact or moved.

Reused: share of the prompts' tokens that were not computed. Extrapolated: share of the requests that lie outside of
what the model was fitted to. Regrets: blocks that were asked for again after they had been evicted. `{OPTIMUM}` knows
every future request (Belady 1966): the bound of held blocks where all have one size; where sizes differ, or spans lose
their first tokens, a good order but no bound. Differences are the policy's minus those of lru with their
{CONFIDENCE:.0%} interval, from {RESAMPLES:,} bootstrap resamples of runs of successive requests; `*` marks those that
exclude 0.
"""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Everything that a replay found. `facts` are sentences about the trace.

    `unlimited_share` is the share of tokens that each rule reuses where nothing has to go.
    """

    source: str
    facts: Sequence[str]
    model: LatencyModel
    rules: Sequence[ReuseRule]
    lines: Sequence[Line]
    unlimited_share: dict[str, float]
    settings: dict[str, Any]
    measured: Measured

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        told = asdict(self)
        return {"schema": SCHEMA, "times": "predicted by the model, ms", **told, **told.pop("measured")}

    def csv(self) -> str:
        """One row a line of the report, with a head; an interval takes three columns."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        plain = [each.name for each in fields(Line) if each.name not in _INTERVALS]
        names = ["predicted_" * name.startswith("ttft") + name for name in plain]
        writer.writerow(names + [f"{name}{end}" for name in _INTERVALS for end in ("", "_low", "_high")])
        for line in self.lines:
            found = [getattr(line, name) for name in _INTERVALS]
            bounds = [("", "", "") if each is None else (each.estimate, each.low, each.high) for each in found]
            writer.writerow([getattr(line, name) for name in plain] + [value for three in bounds for value in three])
        return text.getvalue()

    def page(self, plot_name: str) -> str:
        """The Markdown page, with the plot of that file name beside it."""
        parts = [
            f"# Replay of {self.source}",
            f"{self.measured.sentence()}.",
            " ".join(self.facts),
            self.model.sentence(),
            _NOTES.strip(),
            f"![reused share and predicted TTFT against capacity]({plot_name})",
        ]
        for rule in self.rules:
            head = [f"| {_HEADINGS} |", "|" + "---|" * len(_HEADINGS.split(" | "))]
            rows = [f"| {' | '.join(_cells(line))} |" for line in self._of(rule)]
            parts += [f"## {rule.name}", self._rule_sentence(rule), "\n".join(head + rows)]
        return "\n\n".join(parts) + "\n"

    def tables(self) -> list[Table]:
        """One table for each rule, for a terminal of about 160 columns."""
        tables = []
        for rule in self.rules:
            title = f"{rule.name}: TTFT in ms predicted by the model"
            table = Table(title=title, title_justify="left", caption=self._rule_sentence(rule), caption_justify="left")
            table.add_column("policy", no_wrap=True)
            for heading in _HEADINGS.split(" | ")[1:]:
                table.add_column(heading, justify="right")
            for line in self._of(rule):
                table.add_row(*_cells(line), end_section=line.policy == OPTIMUM)
            tables.append(table)
        return tables

    def _of(self, rule: ReuseRule) -> list[Line]:
        return [line for line in self.lines if line.rule == rule.name]

    def _rule_sentence(self, rule: ReuseRule) -> str:
        return f"{rule.sentence()} Without a limit {self.unlimited_share[rule.name]:.1%} of the tokens are reused."


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.policy,
        f"{line.capacity_tokens:,}",
        f"{line.hit_share:.1%}",
        f"{line.saved_tokens:,}",
        *(f"{value:,.1f}" for value in (line.ttft_p50_ms, line.ttft_p95_ms, line.ttft_p99_ms)),
        f"{line.extrapolated_share:.0%}",
        f"{line.evictions:,}",
        f"{line.regrets:,}",
        _difference(line.hit_share_over_lru, 100.0),
        _difference(line.ttft_over_lru_ms),
    )


def _difference(interval: Interval | None, factor: float = 1.0) -> str:
    if interval is None:
        return "-"
    estimate, low, high = (value * factor for value in (interval.estimate, interval.low, interval.high))
    return f"{estimate:+.1f} [{low:+.1f}, {high:+.1f}]{'*' * interval.is_a_difference}"
