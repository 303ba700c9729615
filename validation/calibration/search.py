"""The search for the cheapest candidate that is non-inferior to cold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from validation.calibration.candidates import candidates
from validation.families.catalog import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from validation.calibration.candidates import Candidate
    from validation.calibration.deviations import PromptDeviations
    from validation.calibration.trials import Trials, Verdict
    from validation.quality.samples import QualityLine


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and how far it came: `stage` is `screen` or `confirm`."""

    candidate: Candidate
    stage: str
    verdict: Verdict


@dataclass(slots=True)
class Found:
    """What the search found: the `winner` and its confirmed lines, or neither, and then the `problem`, if there is one
    beside the candidates' own. `tried` in order; `deviations` of the screened prompts."""

    winner: Candidate | None = None
    lines: tuple[QualityLine, ...] = ()
    problem: str | None = None
    tried: list[Tried] = field(default_factory=list)
    deviations: list[PromptDeviations] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Search:
    """How candidates are tried.

    The deviations of the screening prompts, from Transformers, nominate candidates, whatever engine serves the trials:
    what is chosen is decided by the answers of that engine alone. `num_layers` are the model's.
    `screening` prompts choose, `fresh(n)` gives the prompts of the n-th confirmation, which nothing was chosen by.
    `written` puts a candidate's profile where an engine reads it. `max_tries` bounds what is screened.
    """

    num_layers: int
    kinds: Mapping[str, str]
    screening: Trials
    fresh: Callable[[int], Trials]
    written: Callable[[Candidate], Path]
    max_tries: int
    tell: Callable[[str], None]

    def run(self) -> Found:
        """Tries the candidates by computed share until one is confirmed. Raises SemBlendError."""
        found = Found()
        families = self.screening.known(self.kinds, self.tell)
        found.problem = problem_of(families, self.kinds)
        if found.problem is not None:
            return found
        found.deviations = [prompt for name in families for prompt in self.screening.deviations(name)]
        ordered = self._candidates(found.deviations)
        # By layer the check that computes most: what it lets pass, every other one there does.
        strictest = {each.full_layers: each for each in ordered if each.check is not None}
        for candidate in ordered:
            first = candidate if candidate.check is None else strictest[candidate.full_layers]
            if not all(self._is_screened(found, each, families) for each in (first, candidate)):
                continue
            confirmations = sum(each.stage == "confirm" for each in found.tried)
            verdict = self.fresh(confirmations).judge(self.written(candidate), families, strict=True)
            if self._told(found, candidate, "confirm", verdict):
                found.winner, found.lines = candidate, verdict.lines
                return found
        return found

    def _is_screened(self, found: Found, candidate: Candidate, families: list[str]) -> bool:
        """Whether the candidate holds on the screening prompts, which it is served once; False beyond `max_tries`."""
        screened = [each for each in found.tried if each.stage == "screen"]
        for each in screened:
            if each.candidate is candidate:
                return each.verdict.holds
        if len(screened) == self.max_tries:
            return False
        verdict = self.screening.judge(self.written(candidate), families, strict=False)
        # What one candidate failed at, the next is likely to fail at too.
        families.sort(key=lambda name: name != verdict.inferior)
        return self._told(found, candidate, "screen", verdict)

    def _candidates(self, deviations: Sequence[PromptDeviations]) -> list[Candidate]:
        traps = [prompt for prompt in deviations if self._is_trap(prompt.family)]
        harmless = [prompt for prompt in deviations if not self._is_trap(prompt.family)]
        return candidates(harmless, traps, self.num_layers)

    def _is_trap(self, family: str) -> bool:
        return self.kinds[family] == Kind.TRAP.value

    def _told(self, found: Found, candidate: Candidate, stage: str, verdict: Verdict) -> bool:
        """Notes and tells a verdict; True when it holds."""
        found.tried.append(Tried(candidate, stage, verdict))
        outcome = "holds" if verdict.holds else f"fails at {verdict.inferior}"
        share = f"computes {candidate.computed_share:.1%} of what harmless plans offer"
        self.tell(f"{stage} {candidate.name}, {share}: {outcome}; {verdict.difference()}")
        return verdict.holds


def problem_of(families: Sequence[str], kinds: Mapping[str, str]) -> str | None:
    """Why nothing can be shown with these families, which the model knows cold; None when they suffice."""
    are_traps = [kinds[name] == Kind.TRAP.value for name in families]
    if not any(are_traps):
        return (
            "no trap family is among those whose answers the model knows cold, so that nothing shows whether reuse "
            "goes wrong where a text means something else"
        )
    return "no harmless family is among those whose answers the model knows cold" if all(are_traps) else None
