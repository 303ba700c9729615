"""Report a timed run: gates, which decide the exit status, tables in words, a JSON document, and result rows. And the
page of any run: headline, figures, answers side by side, gates and settings, in one HTML file."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from semblend_trt.errors import ConfigurationError
from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, POSITION_FIX, VERIFIED, is_reusing
from validation.cases import Case, Expectation, grouped
from validation.exactness import Exactness
from validation.families.catalog import FAMILIES, Kind
from validation.metrics import MARGIN, mean, median, percentile
from validation.results import Better, Measured, Results, Row, figure, meets, say
from validation.samples import Sample

EXACTNESS = "wrapper_exactness"
MAX_LOGIT_DIFFERENCE = 1e-4
# Nats by which a GPU's results of one computation may differ.
KL_ROUNDING = 1e-6
# Gates whose lower bound a user may set: its default, and what it bounds.
BOUNDS: dict[str, tuple[float, str]] = {
    "speedup": (1.05, "TTFT against cold"),
    "rouge1": (0.35, "ROUGE-1 F1 against cold's answers"),
    "token_f1": (0.10, "token F1 against cold's answers"),
    # Counts of the audit log.
    "donor_registrations": (1, "requests that became donors"),
    "semantic_hits": (1, "look-ups that found a donor"),
    "materializations": (1, "requests whose donors' KV was placed"),
    "incremental_matched_tokens": (1, "tokens promised beyond the engine's own prefix"),
    "rope_corrections": (1, "requests whose donors' keys were rotated"),
}


def check_bounds(bounds: Mapping[str, float]) -> None:
    """Raise ConfigurationError for a bound, by its gate's name, that is out of range."""
    for name, value in bounds.items():
        option = "--min-" + name.replace("_", "-")
        if name in ("rouge1", "token_f1"):
            if not 0.0 <= value <= 1.0:
                raise ConfigurationError(f"{option} is {value}; the score lies between 0 and 1.")
        elif not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(f"{option} is {value}; it must be a number of at least 0.")


@dataclass(frozen=True, slots=True)
class Gate:
    """A bound on `value`. If `value` is None, no sample has the figure: the gate is shown and does not fail."""

    name: str
    value: float | None
    bound: float
    better: Better
    reads: str

    @property
    def holds(self) -> bool:
        return self.value is None or meets(self.value, self.bound, self.better)

    def sentence(self) -> str:
        relation = "at least" if self.better == "higher" else "at most"
        shown = "not measured" if self.value is None else f"{self.value:.6g}"
        return f"{self.name} is {shown}, {relation} {self.bound:g} is required ({self.reads})"


def gates_of(
    samples: Sequence[Sample],
    audit: Mapping[str, Any],
    policy: str,
    bounds: Mapping[str, float],
    exactness: Exactness | None,
) -> list[Gate]:
    """Return all gates of a run; `audit` is that of `policy`, `bounds` are by gate; `exactness` may be None."""

    def at_least(name: str, value: float | None, reads: str) -> Gate:
        return Gate(name, value, bounds[name], "higher", reads)

    reusing = [s for s in samples if s.arm == policy and s.may_reuse]
    where = f"arm {policy}, workloads in which reuse is expected"
    # The policy may lose what a second cold run loses, and the margin.
    floor = max(0.0, exact_match_drop(samples, COLD_AGAIN) or 0.0)
    least = max(1.0, perplexity_ratio(samples, COLD_AGAIN) or 1.0)
    drop, ratio = exact_match_drop(samples, policy), perplexity_ratio(samples, policy)
    lost, more = f"cold minus {policy}, {where}", f"geometric mean over cold's, {where}"
    kept = "share of requests with an exact prefix that keep all of it, every reusing arm"
    reads, difference, noise = "largest difference of logits; float32 only", None, 0.0
    if exactness is not None:
        difference, noise = exactness.difference, exactness.noise
        reads = f"largest difference of logits from {exactness.against}"
        reads += f", whose own noise is {noise:.2g}" if noise else ""
    return [
        at_least("speedup", median(s.speedup for s in reusing), f"median of TTFT ratios to cold, {where}"),
        at_least("rouge1", mean(s.rouge1_cold for s in reusing), f"mean ROUGE-1 F1 against cold's answer, {where}"),
        at_least("token_f1", mean(s.token_f1_cold for s in reusing), f"mean token F1 against cold's answer, {where}"),
        Gate("exact_match_drop", drop, floor + MARGIN, "lower", f"{lost}; noise floor {floor:.4f}"),
        Gate("perplexity_ratio", ratio, least * (1.0 + MARGIN), "lower", f"{more}; noise floor {least:.4f}"),
        Gate("unrelated_fires", unrelated_fires(samples), 0, "lower", "requests with placed KV, every reusing arm"),
        Gate("exact_prefix_untouched", exact_prefix_untouched(samples), 1.0, "higher", kept),
        *(at_least(name, audit[name], f"audit log of arm {policy}") for name in BOUNDS if name in audit),
        Gate(EXACTNESS, difference, max(MAX_LOGIT_DIFFERENCE, noise), "lower", reads),
    ]


def perplexity_ratio(samples: Sequence[Sample], arm: str) -> float | None:
    """Return the geometric mean of the arm's perplexity over cold's, over cases in which reuse is expected."""
    ratios = (s.perplexity_ratio for s in samples if s.arm == arm and s.may_reuse)
    found = mean(math.log(ratio) for ratio in ratios if ratio)
    return None if found is None else math.exp(found)


def exact_match_drop(samples: Sequence[Sample], arm: str) -> float | None:
    """Return cold's exact match minus the arm's, over cases with a known answer in which reuse is expected."""
    expected = [s for s in samples if s.may_reuse]
    cold, ours = exact_match(expected, COLD), exact_match(expected, arm)
    return None if cold is None or ours is None else cold - ours


def exact_match(samples: Sequence[Sample], arm: str) -> float | None:
    """Return the arm's share of right answers, of cases with a known one."""
    return mean(s.exact_match for s in samples if s.arm == arm)


def unrelated_fires(samples: Sequence[Sample]) -> int | None:
    """Count requests of unrelated prompts with placed KV, in all reusing arms; None without such prompts."""
    unrelated = [s for s in samples if is_reusing(s.arm) and s.expects == Expectation.NONE.value]
    return sum(sample.reused_tokens > 0 for sample in unrelated) if unrelated else None


def exact_prefix_untouched(samples: Sequence[Sample]) -> float | None:
    """Return the share of requests that keep the exact prefix which their donors left; None without any.
    For an exact repeat no other KV may be placed, and answer and first distribution are the exact-prefix arm's."""
    exact = {(s.case_id, s.repeat): s for s in samples if s.arm == EXACT_PREFIX}

    def keeps(sample: Sample) -> bool:
        if sample.exact_prefix_tokens < sample.expected_exact_tokens:
            return False
        if sample.expects != Expectation.EXACT_PREFIX.value:
            return True
        other = exact[sample.case_id, sample.repeat]
        is_same = sample.answer == other.answer and sample.first_token_kl <= other.first_token_kl + KL_ROUNDING
        return is_same and sample.reused_tokens == 0

    return mean(keeps(sample) for sample in samples if is_reusing(sample.arm) and sample.expected_exact_tokens > 0)


FILE_NAME = "end_to_end.json"
HEADER_TRAP = "header_trap"
_TRAPS = (HEADER_TRAP, "headings")
MAX_EM_DROP = 0.02
COLUMNS = 80
# Names of arms for a first look.
ARM_NAMES = {COLD_AGAIN: "cold again", EXACT_PREFIX: "prefix cache", POSITION_FIX: "unchecked", VERIFIED: "checked"}
_HARMLESS = tuple(each.name for each in FAMILIES if each.kind is Kind.HARMLESS)
_TEXTS = tuple(each.name for each in FAMILIES if each.is_text)

_MEANS = (
    *("exact_match", "rouge1_cold", "rouge_l_cold", "token_f1_cold", "rouge1_reference", "rouge_l_reference"),
    *("token_f1_reference", "first_token_kl", "token_agreement"),
)
_TIMED_MEANS = ("prompt_tokens", "exact_prefix_tokens", "reused_tokens", "computed_tokens")
# Figures of a summary that the tables show.
_SPEED = ("timed", "ttft_median_s", "ttft_p95_s", "speedup", *_TIMED_MEANS, "fires")
_ANSWERS = ("samples", *_MEANS[:4], "perplexity_ratio", *_MEANS[-2:])
Grid = tuple[str, list[str], list[list[str]]]  # title, headings and rows


def summary(arm: str, workload: str, size: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return figures of the samples, TTFT and token counts of the timed ones; None where no sample has the figure."""
    timed = [sample for sample in samples if sample.timed]
    ended = [f"{s.outcome} ({s.reason})" if s.reason else s.outcome for s in samples if s.outcome is not None]
    return {
        "arm": arm,
        "workload": workload,
        "size": size,
        "samples": len(samples),
        "timed": len(timed),
        "ttft_median_s": median(sample.ttft_s for sample in timed),
        "ttft_p95_s": percentile((sample.ttft_s for sample in timed), 0.95),
        "speedup": median(sample.speedup for sample in samples),
        "perplexity_ratio": median(sample.perplexity_ratio for sample in samples),
        **{name: mean(getattr(sample, name) for sample in samples) for name in _MEANS},
        **{name: mean(getattr(sample, name) for sample in timed) for name in _TIMED_MEANS},
        "fires": sum(sample.reused_tokens > 0 for sample in samples),
        "outcomes": dict(sorted(Counter(ended).items())),
    }


def summaries(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return one line for each arm, workload and size, in the order in which they appear."""
    by_key = grouped(samples, lambda sample: (sample.arm, sample.workload, sample.size))
    return [summary(*key, chosen) for key, chosen in by_key.items()]


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """What an arm did where reuse is expected. `timed` and `changed` leave out the trap.
    Changed answers are not cold's; `changed` also leaves out texts that may go on in many ways."""

    timed: list[Sample]
    changed: list[bool]
    trap_changed: list[bool]
    trap_wrong: int
    trap_cold_wrong: int

    @classmethod
    def of(cls, samples: Sequence[Sample], arm: str) -> "ArmFigures | None":
        """Return the arm's figures; None if it has no such sample."""
        cold = {(s.case_id, s.repeat): s for s in samples if s.arm == COLD}
        pairs = [(s, cold[s.case_id, s.repeat]) for s in samples if s.arm == arm and s.may_reuse]
        trap = [(ours, other) for ours, other in pairs if ours.workload in _TRAPS]
        if not pairs:
            return None
        return cls(
            timed=[ours for ours, _ in pairs if ours.timed and ours.workload not in _TRAPS],
            changed=[x.answer != other.answer for x, other in pairs if x.workload not in (*_TRAPS, *_TEXTS)],
            trap_changed=[ours.answer != other.answer for ours, other in trap],
            trap_wrong=sum(not ours.is_right for ours, _ in trap),
            trap_cold_wrong=sum(not other.is_right for _, other in trap),
        )

    @property
    def ttft_s(self) -> float | None:
        return median(s.ttft_s for s in self.timed)

    @property
    def speedup(self) -> str:
        """In words: cold's TTFT over the arm's."""
        found = median(s.speedup for s in self.timed)
        return "no time" if found is None else f"{found:.1f}x"

    def sentence(self) -> str:
        time = "no time" if self.ttft_s is None else f"{self.ttft_s * 1e3:,.0f} ms, {self.speedup}"
        share = sum(s.reused_tokens for s in self.timed) / max(1, sum(s.prompt_tokens for s in self.timed))
        trap = f"; trap: {self.trap_wrong} of {len(self.trap_changed)} wrong" if self.trap_changed else ""
        return f"{time}, {share:.0%} reused, {sum(self.changed)} of {len(self.changed)} changed{trap}"

    def verdict(self, checked: "ArmFigures | None") -> str:
        """Say whether the trap catches this unchecked arm, and the checked one."""
        answers = len(self.trap_changed)
        right = answers - self.trap_cold_wrong
        # It bites when at least half of what cold answers right is wrong.
        if right <= 0 or 2 * (answers - self.trap_wrong) > right:
            return "does not bite here"
        if checked is None:
            return "bites"
        lost = checked.trap_wrong - checked.trap_cold_wrong
        return "caught" if lost <= 0 else f"NOT caught, {lost} of {len(checked.trap_changed)} answers lost"


@dataclass(frozen=True, slots=True)
class Report:
    """A run's findings. `settings`: the command's arguments; `notes`: limits of the engine, a sentence each."""

    model: str
    policy: str
    samples: Sequence[Sample]
    audit: dict[str, dict[str, Any]]
    audit_path: str
    gates: Sequence[Gate]
    settings: dict[str, Any]
    measured: Measured
    seconds: float
    notes: Sequence[str] = ()

    @property
    def failed(self) -> list[Gate]:
        return [gate for gate in self.gates if not gate.holds]

    def headline(self) -> str:
        """Say in one sentence what the run shows, with its figures."""
        unchecked, checked = (ArmFigures.of(self.samples, arm) for arm in (POSITION_FIX, VERIFIED))
        parts = []
        if unchecked is not None:
            lost = f"{sum(unchecked.changed)} of {len(unchecked.changed)} answers changed"
            parts.append(f"a document that moved: {unchecked.speedup} faster to the first token, {lost}")
        if checked is None:
            parts.append("checked: not measured")
        else:
            changed = [*checked.changed, *checked.trap_changed]
            among = ", the trap's among them" if checked.trap_changed else ""
            parts.append(f"checked: {checked.speedup}, {sum(changed)} of {len(changed)}{among}")
        if unchecked is not None and unchecked.trap_changed:
            parts.append(f"the trap that breaks unchecked reuse: {unchecked.verdict(checked)}")
        return "; ".join(parts)

    def figures(self) -> list[tuple[str, str]]:
        """Return a name and a sentence for cold, every other arm, and what must not happen."""
        cold = ArmFigures.of(self.samples, COLD)
        found = []
        if cold is not None and cold.ttft_s is not None:
            tokens = sum(s.prompt_tokens for s in cold.timed) // len(cold.timed)
            where = f"{len(cold.timed)}, about {tokens:,} tokens each"
            found.append((COLD, f"{cold.ttft_s * 1e3:,.0f} ms to the first token, median of {where}"))
        for arm in dict.fromkeys(s.arm for s in self.samples if s.arm != COLD):
            if (figures := ArmFigures.of(self.samples, arm)) is not None:
                found.append((ARM_NAMES.get(arm, arm), figures.sentence()))
        unrelated = [s for s in self.samples if s.expects == Expectation.NONE.value and is_reusing(s.arm)]
        control = [f"{unrelated_fires(unrelated)} of {len(unrelated)} unrelated prompts reused KV"] if unrelated else []
        control += [f"logits within {g.value:.1e}" for g in self.gates if g.name == EXACTNESS and g.value is not None]
        return [*found, ("controls", "; ".join(control))] if control else found

    def screen(self) -> list[str]:
        """Return headline, figures and what the gates read, as lines of a terminal of 80 columns."""
        known = [gate for gate in self.gates if gate.value is not None]
        values = ", ".join(f"{gate.name} {gate.value:.4g}{'' if gate.holds else ' FAILED'}" for gate in known)
        gates = f"gates: {sum(gate.holds for gate in known)} of {len(known)} hold: {values}"
        return [*wrapped(self), *textwrap.wrap(gates, COLUMNS)]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON; the SemBlend package's validation uses the names `num_samples` to `audit` too."""
        reusing = [s for s in self.samples if s.arm == self.policy and s.may_reuse]
        return {
            "schema": 1,
            "model": self.model,
            "policy": self.policy,
            "num_samples": len(reusing),
            "mean_speedup": mean(s.speedup for s in reusing),
            "mean_rouge1_f1": mean(s.rouge1_cold for s in reusing),
            "mean_token_f1": mean(s.token_f1_cold for s in reusing),
            "audit": {"path": self.audit_path, **self.audit[self.policy]},
            "passed": not self.failed,
            "gates": [{**asdict(gate), "holds": gate.holds} for gate in self.gates],
            "noise_floor": self._noise_floor(),
            "summary": summaries(self.samples),
            "settings": self.settings,
            **asdict(self.measured),
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "samples": [asdict(sample) for sample in self.samples],
        }

    def grids(self) -> list[Grid]:
        """Return tables of speed and of answers, by arm, workload and size; the noise floor ends that of answers."""
        lines = summaries(self.samples)
        speed = _grid("Speed: TTFT of timed prompts, tokens a prompt", _SPEED, lines)
        title = "Answers: exact match with the known answer, the rest against cold"
        return [speed, _grid(title, _ANSWERS, [*lines, self._noise_floor()])]

    def _noise_floor(self) -> dict[str, Any]:
        return summary(COLD_AGAIN, "all", "all", [s for s in self.samples if s.arm == COLD_AGAIN])


def wrapped(report: Any, table: Iterable[str] = ()) -> list[str]:
    """Return headline, `table` and figures of a Report or a QualityReport, as lines of a terminal of 80 columns."""
    lines = [*textwrap.wrap(report.headline(), COLUMNS), *table]
    for name, sentence in report.figures():
        lines += textwrap.wrap(f"{name:<14}{sentence}", COLUMNS, subsequent_indent=" " * 14)
    return lines


def show(report: Any, seconds: float, output: Path, page_path: Path | None) -> None:
    """Print a Report or a QualityReport, and where its files are."""
    notes = (f"note: {note}" for note in getattr(report, "notes", ()))
    place = () if page_path is None else (f"page: {page_path}",)
    for line in (*report.screen(), *notes, *place, f"{seconds:.0f} s; every sample is in {output}"):
        say(line)


def _grid(title: str, names: Sequence[str], lines: Sequence[dict[str, Any]]) -> Grid:
    keys = ("workload", "size", "arm")
    rows = [[*(line[key] for key in keys), *(figure(line[name]) for name in names)] for line in lines]
    return title, [name.replace("_", " ") for name in (*keys, *names)], rows


def end_to_end_rows(
    samples: Sequence[Sample], exactness: Exactness | None, device: str, measured: Measured, engine: str = ""
) -> list[Row]:
    """Return the measured rows of the built-in cases under position_fix and verified.
    Names begin with `engine`, such as `vllm_`, and all but the wrapper's exactness go on with `cpu` or `gpu`."""
    kind = engine + ("gpu" if device.startswith("cuda") else "cpu")
    results = Results(measured=measured, is_shown=False)
    for name, arm in ((f"{kind}_shifted", POSITION_FIX), (f"{kind}_verified", VERIFIED)):
        for label, size in (("2k", "2048"), ("4k", "4096")):
            shifted = [s for s in samples if s.workload in _HARMLESS and s.size == size and s.timed]
            own = [s for s in shifted if s.arm == arm]
            speedup, cold_s = median(s.speedup for s in own), median(s.ttft_s for s in shifted if s.arm == COLD)
            prompt, part = mean(s.prompt_tokens for s in own), mean(s.computed_tokens for s in own)
            if speedup is not None and cold_s is not None:
                against = f"cold: {cold_s * 1e3:,.0f} ms for {prompt:,.0f} tokens, of which {arm} computes {part:,.0f}"
                results.add(f"{name}_{label}_ttft_speedup", speedup, "x", against, BOUNDS["speedup"][0], "higher")
    for name, arm, workloads in (
        (f"{kind}_harmless_em_drop", POSITION_FIX, _HARMLESS),
        (f"{kind}_verified_em_drop", VERIFIED, (*_HARMLESS, HEADER_TRAP)),
    ):
        chosen = [s for s in samples if s.workload in workloads]
        drop, cold = exact_match_drop(chosen, arm), exact_match(chosen, COLD)
        if drop is not None and cold is not None:
            answers = sum(s.arm == COLD and s.exact_match is not None for s in chosen)
            results.add(name, drop, "exact match", f"cold: {cold:.3f} of {answers} answers", MAX_EM_DROP)
    trap = [s for s in samples if s.workload == HEADER_TRAP]
    cold, ours = exact_match(trap, COLD), exact_match(trap, POSITION_FIX)
    if cold is not None and ours is not None:
        # If reuse without a check does not fail on the trap, the trap shows nothing.
        baseline = f"cold: {cold:.3f}; the trap has to bite"
        results.add(f"{kind}_trap_position_fix_em", ours, "exact match", baseline, cold / 2)
    if (fires := unrelated_fires(samples)) is not None:
        prompts = len({(s.case_id, s.repeat) for s in samples if s.expects == Expectation.NONE.value})
        baseline = f"{prompts} unrelated prompts in each reusing arm"
        results.add(f"{kind}_unrelated_fires", fires, "requests", baseline, 0)
    if exactness is not None:
        goal = max(MAX_LOGIT_DIFFERENCE, exactness.noise)
        name = f"{engine}wrapper_exactness_max_logit_diff"
        results.add(name, exactness.difference, "logits", exactness.against, goal)
    return results.rows


_BY_KIND = {
    Kind.HARMLESS: "The documents are elsewhere than in the request before, and mean the same there.",
    Kind.TRAP: "The reused text means something else after another heading.",
    Kind.NONE: "Shares no text with a request before.",
    Kind.EXACT: "The request before once more: the engine's own prefix cache serves it.",
}
_WHAT = {each.name: (each.write.__doc__ if each.marks is False else None) or _BY_KIND[each.kind] for each in FAMILIES}


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
        key = case.workload if case.workload in _WHAT else case.id
        if key not in chosen or (is_split[case.id] and not is_split[chosen[key].id]):
            chosen[key] = case
    return [
        {
            "case": case,
            "what": _WHAT.get(case.workload, ""),
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
