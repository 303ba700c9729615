"""The page of a run: headline, figures, answers side by side, gates and settings, in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from validation.arms import COLD, POSITION_FIX, VERIFIED
from validation.cases import Case
from validation.families.catalog import FAMILIES, Kind
from validation.report import ARM_NAMES
from validation.samples import Sample

_BY_KIND = {
    Kind.HARMLESS: "The documents are elsewhere than in the request before, and mean the same there.",
    Kind.TRAP: "The reused text means something else after another heading.",
    Kind.NONE: "Shares no text with a request before.",
    Kind.EXACT: "The request before once more: the engine's own prefix cache serves it.",
}
_FAMILIES = {
    each.name: (each.write.__doc__ if each.marks is False else None) or _BY_KIND[each.kind] for each in FAMILIES
}


def marked(tokenizer: Any, prompt: str, sample: Sample) -> list[tuple[str, str]]:
    """Return the prompt in pieces with their kinds: `exact` from the engine's prefix, `reused` from donors, else ""."""
    tokens = tokenizer.encode(prompt)

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


def _shown(sample: Sample, cold: Sample, case: Case, tokenizer: Any) -> dict[str, Any]:
    """Return one arm's answer as the page shows it; `verdict` and `tokens` are words, `prompt` is as in `marked`."""
    words = [] if sample.exact_match is None else ["right" if sample.is_right else "wrong"]
    if sample.arm != COLD:
        words.append("as cold" if sample.answer == cold.answer else "not cold's answer")
        words += [] if sample.answer_kl is None else [f"KL {sample.answer_kl:.2g} nats a token"]
    if sample.ttft_s is not None:
        words.append(f"first token after {sample.ttft_s * 1e3:,.0f} ms")
    tokens = [f"{sample.prompt_tokens:,} tokens", f"{sample.computed_tokens:,} computed"]
    for name in ("exact_prefix", "reused", "checked", "recomputed"):
        if count := getattr(sample, f"{name}_tokens"):
            tokens.append(f"{count:,} {name.replace('_', ' ')}")
    return {
        "arm": ARM_NAMES.get(sample.arm, sample.arm),
        "answer": sample.answer,
        "verdict": "; ".join(words),
        "tokens": ", ".join(tokens),
        "prompt": marked(tokenizer, case.prompt, sample),
    }


def examples(samples: Sequence[Sample], policy: str, cases: Sequence[Case], tokenizer: Any) -> list[dict[str, Any]]:
    """Return one case of each workload, at best one that the arms answer apart, and a user's first prompts."""
    by_case: dict[str, dict[str, Sample]] = {}
    for sample in samples:
        if sample.repeat == 0 and sample.arm in (COLD, POSITION_FIX, VERIFIED, policy):
            by_case.setdefault(sample.case_id, {})[sample.arm] = sample
    is_split = {name: len({sample.answer for sample in arms.values()}) > 1 for name, arms in by_case.items()}
    chosen: dict[str, Case] = {}
    for case in cases:
        key = case.workload if case.workload in _FAMILIES else case.id
        if key not in chosen or (is_split[case.id] and not is_split[chosen[key].id]):
            chosen[key] = case
    return [
        {
            "case": case,
            "what": _FAMILIES.get(case.workload, ""),
            "arms": [_shown(each, by_case[case.id][COLD], case, tokenizer) for each in by_case[case.id].values()],
        }
        for case in list(chosen.values())[:12]
    ]


def page(report: Any, cases: Sequence[Case], tokenizer: Any) -> str:
    """Return the HTML of a Report or a QualityReport. It loads nothing, and all text of a run is escaped."""
    template = (files("validation") / "assets" / "report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    shown = examples(report.samples, getattr(report, "policy", VERIFIED), cases, tokenizer)
    return environment.from_string(template).render(report=report, examples=shown)
