"""The report of a run: a table for the terminal and a JSON document with every sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.table import Table

from validation.arms import COLD_AGAIN
from validation.cases import Expectation
from validation.metrics import mean
from validation.summary import Summary, summarise, summary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.results import Measured
    from validation.audit_log import AuditCounts
    from validation.gates import Gate
    from validation.samples import Sample

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a run found. `settings` are the command's arguments, `notes` what the engine cannot do, a
    sentence each."""

    model: str
    policy: str
    samples: Sequence[Sample]
    audit: dict[str, AuditCounts]
    audit_path: str
    gates: Sequence[Gate]
    settings: dict[str, Any]
    measured: Measured
    seconds: float
    notes: Sequence[str] = ()

    @property
    def failed(self) -> list[Gate]:
        return [gate for gate in self.gates if not gate.holds]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form. `num_samples` to `audit` are named as the SemBlend package's validation names them."""
        reusing = [s for s in self.samples if s.arm == self.policy and Expectation(s.expects).may_reuse]
        audit = self.audit[self.policy]
        return {
            "schema": SCHEMA,
            "model": self.model,
            "policy": self.policy,
            "num_samples": len(reusing),
            "mean_speedup": mean([s.speedup for s in reusing if s.speedup is not None]),
            "mean_rouge1_f1": mean([s.rouge1_cold for s in reusing]),
            "mean_token_f1": mean([s.token_f1_cold for s in reusing]),
            "audit": {
                "path": self.audit_path,
                **asdict(audit),
                "rejection_reasons": dict(audit.rejection_reasons),
            },
            "passed": not self.failed,
            "gates": [{**asdict(gate), "holds": gate.holds} for gate in self.gates],
            "noise_floor": asdict(self._noise_floor()),
            "summary": [asdict(line) for line in summarise(self.samples)],
            "settings": self.settings,
            **asdict(self.measured),
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "samples": [asdict(sample) for sample in self.samples],
        }

    def tables(self) -> list[Table]:
        """Speed, closeness and gates, for a terminal of about 110 columns."""
        lines = summarise(self.samples)
        return [_speed_table(lines), _quality_table(lines, self._noise_floor()), _gate_table(self.gates)]

    def _noise_floor(self) -> Summary:
        return summary(COLD_AGAIN, "all", "all", [s for s in self.samples if s.arm == COLD_AGAIN])


def _speed_table(lines: Sequence[Summary]) -> Table:
    table = _table(
        "Speed: TTFT of timed prompts, tokens a prompt",
        "n|TTFT ms|p95 ms|speed-up|prompt|exact|reused|computed|fires",
    )
    for line in _with_sections(table, lines):
        table.add_row(
            *_names(line),
            str(line.timed),
            _number(line.ttft_median_s, 1, 1e3),
            _number(line.ttft_p95_s, 1, 1e3),
            _number(line.speedup, 2),
            _number(line.prompt_tokens, 0),
            _number(line.exact_prefix_tokens, 0),
            _number(line.reused_tokens, 0),
            _number(line.computed_tokens, 0),
            str(line.fires),
        )
    return table


def _quality_table(lines: Sequence[Summary], floor: Summary) -> Table:
    table = _table(
        "Answers: exact match (EM) with the known answer, the rest against cold",
        "n|EM|ROUGE-1|ROUGE-L|token F1|PPL ratio|KL nats|agreement",
    )
    for line in chain(_with_sections(table, lines), [floor]):
        table.add_row(
            *_names(line),
            str(line.samples),
            _number(line.exact_match, 3),
            _number(line.rouge1_cold, 3),
            _number(line.rouge_l_cold, 3),
            _number(line.token_f1_cold, 3),
            _number(line.perplexity_ratio, 4),
            _number(line.first_token_kl, 5),
            _number(line.token_agreement, 3),
        )
    return table


def _gate_table(gates: Sequence[Gate]) -> Table:
    table = Table(title="Gates", title_justify="left")
    for heading in ("gate", "value", "bound", "holds", "reads"):
        table.add_column(heading, justify="right" if heading in ("value", "bound") else "left", overflow="fold")
    for gate in gates:
        bound = f"{'>=' if gate.better == 'higher' else '<='} {gate.bound:g}"
        verdict = "no sample" if gate.value is None else "yes" if gate.holds else "[bold red]no[/]"
        table.add_row(gate.name, "-" if gate.value is None else f"{gate.value:.4g}", bound, verdict, gate.reads)
    return table


def _table(title: str, columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("workload", "size", "arm"):
        table.add_column(heading, no_wrap=True)
    for heading in columns.split("|"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _with_sections(table: Table, lines: Sequence[Summary]) -> Iterator[Summary]:
    """The lines, with a rule in the table behind the last one of a workload and size."""
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        yield line
        if following is None or (line.workload, line.size) != (following.workload, following.size):
            table.add_section()


def _names(line: Summary) -> tuple[str, str, str]:
    return line.workload, line.size, line.arm


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"
