"""The page of a timed run: headline, figures, answers side by side, gates and settings, in one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from validation.arms import COLD, POSITION_FIX, VERIFIED
from validation.families.catalog import FAMILIES, Kind
from validation.report import ARM_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

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
_MAX_EXAMPLES = 12


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
        return cls(ARM_NAMES.get(sample.arm, sample.arm), sample.answer, "; ".join(words), ", ".join(tokens), prompt)


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
    return environment.from_string(template).render(report=report, examples=examples(report, cases, tokenizer))
