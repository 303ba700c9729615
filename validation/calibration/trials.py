"""Serves families under a candidate, beside cold, until one of them is inferior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import SemBlendError
from validation.arms import COLD, VERIFIED, ArmChoices, arms_of
from validation.noninferiority import MARGIN
from validation.quality.batches import BatchServer
from validation.quality.samples import line_of, samples_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from engine_wrapper.embedded.model_runner import ModelRunner
    from validation.cases import Case
    from validation.quality.answers import Answer
    from validation.quality.batches import BatchSettings
    from validation.quality.samples import QualityLine, QualitySample


@dataclass(frozen=True, slots=True)
class Verdict:
    """`lines`: the families that were served, the last of them the inferior one where `holds` is False."""

    holds: bool
    lines: tuple[QualityLine, ...]

    @property
    def inferior(self) -> str | None:
        """The family that ended the trial."""
        return None if self.holds else self.lines[-1].family

    def difference(self) -> str:
        """In words: how the family that ended the trial compares with cold; the widest bound without one."""
        lines = self.lines if self.holds else self.lines[-1:]
        bounds = [bound for line in lines for bound in (line.exact_match_bound, line.loss_bound) if bound is not None]
        lowest = min(bounds, key=lambda bound: bound.lower, default=None)
        return "nothing was compared" if lowest is None else lowest.sentence()


class Trials:
    """One set of prompts by family, with cold's answers, which are served once.

    Families come in the order in which a candidate is likely to fail them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        families: Mapping[str, Sequence[Case]],
        settings: BatchSettings,
        seed: int,
    ) -> None:
        self._runner, self._seed = runner, seed
        self._cases = families
        self._servers = {name: BatchServer(runner, cases, settings) for name, cases in families.items()}
        self._cold: dict[str, dict[str, Answer]] = {}

    def server(self, family: str) -> BatchServer:
        return self._servers[family]

    def cases(self, families: Iterable[str]) -> list[Case]:
        return [case for name in families for case in self._cases[name]]

    def cold_line(self, family: str) -> QualityLine:
        """Cold against itself: what the model can do."""
        cold = self._cold_samples(family)
        return line_of(family, COLD, list(cold.values()), cold, self._seed)

    def judge(self, profile: Path, full_layers: int, families: Sequence[str], *, strict: bool) -> Verdict:
        """Serves the families under policy verified with this profile until one is inferior.

        With `strict` a family must be non-inferior; without, it must only have lost no more than the margin, which
        few prompts can show. Raises SemBlendError when the engine does not take the profile.
        """
        num_layers = self._runner.facts.num_layers
        choices = ArmChoices(num_layers, boundary=1, profile=profile, profile_layers=full_layers)
        [arm] = arms_of([VERIFIED], choices)
        lines = []
        for family in families:
            answers = self._servers[family].answers(arm)
            samples = samples_of(arm, self._cases[family], answers, self._cold_answers(family), num_layers)
            _check_profile_was_used(samples)
            lines.append(line_of(family, VERIFIED, samples, self._cold_samples(family), self._seed))
            if not (lines[-1].holds if strict else _has_lost_little(lines[-1])):
                return Verdict(False, tuple(lines))
        return Verdict(True, tuple(lines))

    def _cold_answers(self, family: str) -> dict[str, Answer]:
        if family not in self._cold:
            [arm] = arms_of([COLD], ArmChoices(self._runner.facts.num_layers, boundary=1))
            self._cold[family] = self._servers[family].answers(arm)
        return self._cold[family]

    def _cold_samples(self, family: str) -> dict[str, QualitySample]:
        [arm] = arms_of([COLD], ArmChoices(self._runner.facts.num_layers, boundary=1))
        answers = self._cold_answers(family)
        samples = samples_of(arm, self._cases[family], answers, answers, self._runner.facts.num_layers)
        return {sample.case_id: sample for sample in samples}


def _has_lost_little(line: QualityLine) -> bool:
    bounds = (line.exact_match_bound, line.loss_bound)
    return all(bound.difference >= -MARGIN for bound in bounds if bound is not None)


def _check_profile_was_used(samples: Sequence[QualitySample]) -> None:
    for sample in samples:
        if sample.reason in ("no_profile", "profile_mismatch", "profile_unreadable"):
            raise SemBlendError(
                f"Case {sample.case_id}: the engine does not take the profile that is tried ({sample.reason}); what "
                "differs is in its log."
            )
