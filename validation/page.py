"""The page of a timed run: headline, figures, plots, answers side by side, gates and settings, in one HTML file."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from validation.arms import COLD, POSITION_FIX, VERIFIED
from validation.cases import Expectation
from validation.families.catalog import FAMILIES, Kind
from validation.metrics import mean, median
from validation.output import svg
from validation.report import ARM_NAMES, HEADER_TRAP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from validation.cases import Case
    from validation.report import Report
    from validation.samples import Sample

_KINDS = {each.name: each.kind for each in FAMILIES}
_TOLD = {
    Kind.HARMLESS: "The documents stand elsewhere than in the request before, and mean the same there.",
    Kind.TRAP: "The reused text means something else behind another heading.",
    Kind.NONE: "Shares no text with a request before.",
    Kind.EXACT: "The request before once more: the engine's own prefix cache serves it.",
}
# As Okabe and Ito chose them: people with any colour vision tell them apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73")
_MAX_EXAMPLES = 12
# As wide as a telephone, so that its text stays legible there.
_WIDTH, _ROW_HEIGHT, _MARGIN = 4.0, 0.5, 1.1


@dataclass(frozen=True, slots=True)
class Chart:
    """Horizontal bars: for each of `labels` a value of every one of `series`, None where it was not measured."""

    title: str
    unit: str
    labels: tuple[str, ...]
    series: Mapping[str, Sequence[float | None]]
    is_stacked: bool = False

    @property
    def told(self) -> str:
        """The same in words."""
        bars = []
        for index, label in enumerate(self.labels):
            values = ((name, each[index]) for name, each in self.series.items())
            known = [f"{name} {_number(value)}" for name, value in values if value is not None]
            bars.append(f"{label}: {', '.join(known) or 'not measured'}")
        return f"{self.title}, {self.unit}. {'; '.join(bars)}."

    @property
    def image(self) -> str:
        """The drawing, as a data URI of an SVG."""
        figure = Figure(figsize=(_WIDTH, _MARGIN + _ROW_HEIGHT * len(self.labels)), layout="constrained")
        axes = figure.subplots()
        rows, left = range(len(self.labels)), [0.0] * len(self.labels)
        height = 0.8 if self.is_stacked else 0.8 / len(self.series)
        for number, (name, values) in enumerate(self.series.items()):
            known = [0.0 if value is None else value for value in values]
            shift = 0.0 if self.is_stacked else (number - (len(self.series) - 1) / 2) * height
            places = [row + shift for row in rows]
            colour = _COLOURS[number % len(_COLOURS)]
            bars = axes.barh(places, known, height, left=left if self.is_stacked else None, color=colour, label=name)
            if self.is_stacked:
                left = [before + value for before, value in zip(left, known, strict=True)]
            else:
                axes.bar_label(bars, ["" if value is None else _number(value) for value in values], padding=2)
        axes.set_yticks(rows, self.labels)
        axes.invert_yaxis()
        axes.margins(x=0.0 if self.is_stacked else 0.15)
        axes.set_xlabel(self.unit)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=len(self.series), frameon=False, fontsize="small")
        return "data:image/svg+xml;base64," + base64.b64encode(svg(figure)).decode("ascii")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def charts_of(samples: Sequence[Sample]) -> list[Chart]:
    """Times, where the tokens came from, and right answers, by arm; without those that nothing was measured for."""
    arms = tuple(dict.fromkeys(sample.arm for sample in samples))
    labels = tuple(_name(arm) for arm in arms)
    reusable = [sample for sample in samples if Expectation(sample.expects).may_reuse]
    moved = [sample for sample in reusable if sample.workload != HEADER_TRAP]
    timed = [sample for sample in moved if sample.timed]
    trap = [sample for sample in reusable if sample.workload == HEADER_TRAP]

    def by_arm(chosen: Sequence[Sample], figure: Any) -> list[float | None]:
        return [figure([sample for sample in chosen if sample.arm == arm]) for arm in arms]

    times = {
        _size(size): by_arm(
            [each for each in timed if each.size == size],
            lambda found: median(None if each.ttft_s is None else each.ttft_s * 1e3 for each in found),
        )
        for size in dict.fromkeys(sample.size for sample in timed)
    }
    sources = {
        name: by_arm(timed, lambda found, field=field: mean(100 * getattr(s, field) / s.prompt_tokens for s in found))
        for name, field in (
            ("exact prefix", "exact_prefix_tokens"),
            ("reused", "reused_tokens"),
            ("computed", "computed_tokens"),
        )
    }
    right = {
        name: by_arm(chosen, lambda found: mean(None if s.exact_match is None else 100 * s.exact_match for s in found))
        for name, chosen in (("moved documents", moved), ("trap", trap))
        if any(sample.exact_match is not None for sample in chosen)
    }
    charts = [
        Chart("Time to the first token", "ms, median", labels, times),
        Chart("Where the tokens of moved documents came from", "% of the prompt", labels, sources, is_stacked=True),
        Chart("Right answers", "% of those that are known", labels, right),
    ]
    return [chart for chart in charts if chart.series and labels]


def _name(arm: str) -> str:
    return ARM_NAMES.get(arm, arm)


def _size(size: str) -> str:
    return f"up to {int(size):,} tokens" if size.isdecimal() else "all prompts"


def marked(tokenizer: Any, prompt: str, sample: Sample) -> list[tuple[str, str]]:
    """The prompt in pieces, each with its kind: `exact` from the engine's own prefix, `reused` from donors, else ""."""
    tokens = [int(token) for token in tokenizer.encode(prompt)]

    def start(count: int) -> str:
        return str(tokenizer.decode(tokens[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    text, done = start(len(tokens)), 0
    spans = sorted(sample.spans) if sample.reused_tokens else []
    runs = [(0, sample.exact_prefix_tokens, "exact"), *((first, first + length, "reused") for first, length in spans)]
    pieces = []
    for first, last, kind in runs:
        begin, end = max(done, len(start(first))), len(start(last))
        if begin < end:
            pieces += [("", text[done:begin]), (kind, text[begin:end])]
            done = end
    return [piece for piece in [*pieces, ("", text[done:])] if piece[1]]


@dataclass(frozen=True, slots=True)
class Shown:
    """One arm's answer as the page shows it; `verdict` and `tokens` are words, `prompt` is as `marked` gives it."""

    arm: str
    answer: str
    verdict: str
    tokens: str
    prompt: list[tuple[str, str]]

    @classmethod
    def of(cls, sample: Sample, cold: Sample, case: Case, tokenizer: Any) -> Shown:
        words = [] if sample.exact_match is None else ["right" if sample.exact_match else "wrong"]
        if sample.arm != COLD:
            words.append("as cold" if sample.answer == cold.answer else "not cold's answer")
        if sample.ttft_s is not None:
            words.append(f"first token after {sample.ttft_s * 1e3:,.0f} ms")
        tokens = [f"{sample.prompt_tokens:,} tokens", f"{sample.computed_tokens:,} computed"]
        for name in ("exact_prefix", "reused", "checked", "recomputed"):
            if count := getattr(sample, f"{name}_tokens"):
                tokens.append(f"{count:,} {name.replace('_', ' ')}")
        prompt = marked(tokenizer, case.prompt, sample)
        return cls(_name(sample.arm), sample.answer, "; ".join(words), ", ".join(tokens), prompt)


def examples(report: Report, cases: Sequence[Case], tokenizer: Any) -> list[dict[str, Any]]:
    """Cases under cold, unchecked and checked: of each built-in workload one, if any one that they answer apart, and of
    a user's prompts the first."""
    by_case: dict[str, dict[str, Sample]] = {}
    for sample in report.samples:
        if sample.repeat == 0 and sample.arm in (COLD, POSITION_FIX, VERIFIED, report.policy):
            by_case.setdefault(sample.case_id, {})[sample.arm] = sample
    chosen: dict[str, Case] = {}
    for case in cases:
        is_split = len({sample.answer for sample in by_case[case.id].values()}) > 1
        key = case.workload if case.workload in _KINDS else case.id
        before = chosen.get(key)
        if before is None or (is_split and len({s.answer for s in by_case[before.id].values()}) == 1):
            chosen[key] = case
    return [
        {
            "case": case,
            "told": _TOLD[_KINDS[case.workload]] if case.workload in _KINDS else "",
            "arms": [Shown.of(each, by_case[case.id][COLD], case, tokenizer) for each in by_case[case.id].values()],
        }
        for case in list(chosen.values())[:_MAX_EXAMPLES]
    ]


def page(report: Report, cases: Sequence[Case], tokenizer: Any) -> str:
    """The page as HTML that loads nothing; all text of prompts, answers and settings is escaped."""
    template = (files("validation") / "assets" / "report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        report=report, charts=charts_of(report.samples), examples=examples(report, cases, tokenizer)
    )
