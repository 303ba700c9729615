"""A quality run's findings as a JSON document and a Markdown page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from validation.arms import COLD, COLD_AGAIN
from validation.metrics import CONFIDENCE, MARGIN, RESAMPLES
from validation.quality.plot import Panel
from validation.quality.samples import QualityLine, line_of, lines_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.results import Measured
    from validation.quality.samples import QualitySample

SCHEMA = 1
_HEADINGS = (
    "family | kind | arm | prompts | groups | EM | EM - cold | bound | donor's | PPL ratio | bound | agreement | "
    "KL nats | fires | offered | checked | reused | recomputed | computed | largest kept | non-inferior"
)


@dataclass(frozen=True, slots=True)
class QualityReport:
    """Everything that a run found. `kinds`: each family's kind, `harmless`, `trap` and so on."""

    model: str
    samples: Sequence[QualitySample]
    kinds: Mapping[str, str]
    settings: dict[str, Any]
    measured: Measured
    seconds: Mapping[str, float]
    seed: int = 0

    def cold(self) -> dict[str, QualitySample]:
        """Cold's samples by case id."""
        return {sample.case_id: sample for sample in self.samples if sample.arm == COLD}

    def lines(self) -> list[QualityLine]:
        """One line for each family and arm."""
        return lines_of(self.samples, self.cold(), self.seed)

    def kind_lines(self) -> list[QualityLine]:
        """One line for each kind of family and arm, over all families of the kind."""
        by_key: dict[tuple[str, str], list[QualitySample]] = {}
        for sample in self.samples:
            by_key.setdefault((self.kinds[sample.family], sample.arm), []).append(sample)
        cold = self.cold()
        return [line_of(kind, arm, chosen, cold, self.seed) for (kind, arm), chosen in by_key.items()]

    def panels(self) -> list[Panel]:
        """One panel for each kind of family that has right answers."""
        lines = self.kind_lines()
        return [
            Panel(kind, tuple(line for line in lines if line.family == kind))
            for kind in dict.fromkeys(line.family for line in lines)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form with every sample."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "margin": MARGIN,
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "kinds": dict(self.kinds),
            "lines": [_line_fields(line) for line in self.lines()],
            "kind_lines": [_line_fields(line) for line in self.kind_lines()],
            "noise_floor": [_line_fields(line) for line in self.kind_lines() if line.arm == COLD_AGAIN],
            "settings": self.settings,
            **asdict(self.measured),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "samples": [asdict(sample) for sample in self.samples],
        }

    def page(self, plot_name: str | None) -> str:
        """The Markdown page, with the plot of that file name beside it, if there is one."""
        head = [f"| {_HEADINGS} |", "|" + "---|" * len(_HEADINGS.split(" | "))]
        rows = [
            f"# Quality of reuse: {self.model}",
            "",
            f"{self.measured.sentence()}, "
            + ", ".join(f"{name} {version}" for name, version in self.measured.versions.items())
            + ".",
            "",
            f"An arm is non-inferior where the one-sided {CONFIDENCE:.0%} lower bound of its score minus cold's is at "
            f"least -{MARGIN:g}: exact match (EM) where one answer is right, log-likelihood of the reference where a "
            "text was scored (PPL ratio; its bound is the largest ratio not excluded). Bounds are from a paired "
            f"bootstrap of {RESAMPLES:,} resamples over groups of questions on the same documents. `{COLD_AGAIN}` is "
            "the noise floor. Donor's: share of the answers that are the wrong one of the donor's text. Computed: "
            "share of tokens times layers. Tokens are sums over the prompts.",
            "",
            *((f"![exact match against computed share]({plot_name})", "") if plot_name is not None else ()),
            *head,
        ]
        rows += [self._row(line, self.kinds[line.family]) for line in self.lines()]
        rows += ["", "Over all families of a kind:", "", *head]
        rows += [self._row(line, line.family) for line in self.kind_lines()]
        return "\n".join(rows) + "\n"

    def _row(self, line: QualityLine, kind: str) -> str:
        exact, loss = line.exact_match_bound, line.loss_bound
        cells = (
            *(line.family, kind, line.arm, str(line.samples), str(line.groups)),
            _number(line.exact_match, 3),
            *(("-", "-") if exact is None else (f"{exact.difference:+.4f}", f"{exact.lower:+.4f}")),
            _number(line.follows_donor, 3),
            *(("-", "-") if loss is None else (_number(line.ppl_ratio, 4), _number(loss.largest_ratio, 4))),
            *(f"{line.agreement:.3f}", f"{line.first_token_kl:.5f}", str(line.fires)),
            *(f"{number:,}" for number in (line.offered, line.checked, line.reused, line.recomputed)),
            *(f"{line.computed_share:.1%}", f"{line.largest_kept:.3f}"),
            "-" if exact is None and loss is None else "yes" if line.holds else "**no**",
        )
        return "| " + " | ".join(cells) + " |"


def _line_fields(line: QualityLine) -> dict[str, Any]:
    return {**asdict(line), "non_inferior": line.holds}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
