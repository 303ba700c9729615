"""Observer: serves prompts cold and under trial profiles, and says how far reuse moved each answer from cold's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from semblend_trt.errors import SemBlendError
from semblend_trt.reuse_profile import ProfileBound, ProfileLevel, ReuseProfile
from validation.arms import ROUNDING_ARMS, VERIFIED, Arm, ArmChoices, arms_of
from validation.calibration.bound import Observation, distance_of
from validation.cases import Case
from validation.engines import Engines
from validation.measurement import BatchServer, ServingSettings
from validation.models import PROFILE_NAME, full_layers_of
from validation.output import progress
from validation.samples import Sample

# A trial's bound is never asked for in service.
_TRIAL_KL, _TRIAL_RISK, _ANY_DEVIATION = 1.0, 0.5, 1e6
# Why one prompt is not served wholly from donors. Any other reason is the engine's, which then serves all as stock.
_OF_ONE_PROMPT = {
    *("lookup_timeout", "internal_error", "invalid_tokens", "short_prompt", "prefix_covers_prompt", "no_donor_match"),
    *("donor_unavailable", "donor_on_disk", "chunk_edge", "low_reuse", "not_exact", "not_honoured", "forward_failed"),
    *("target_blocks", "load_failed", "deviation", "risk_above_bound", "resumed_with_output", "lookup_bound"),
}


class Observer:
    """Serves `cases` of one model without their references, as no label is needed; cold answers each once. Groups find
    their own donors only: a donor that itself reuses what moved, as it would from other groups, is not kept."""

    def __init__(self, engines: Engines, cases: Sequence[Case], settings: ServingSettings) -> None:
        self._layers, self._has_other_dtype = engines.facts.num_layers, engines.has_other_dtype
        bare = [replace(case, reference=None, known_answer=False) for case in cases]
        self._cases = {case.id: case for case in bare}
        self._server = BatchServer(engines, bare, settings, judged=True)

    def rounding(self, cases: Iterable[Case]) -> list[float]:
        """Return the KL of other cold runs from cold, nats over each answer: in other batches, chunks and types."""
        arms = [arm for arm in ROUNDING_ARMS if self._has_other_dtype or not arm.is_other_dtype]
        found = (sample.answer_kl for arm in arms for sample in self._samples(arm, cases, f"rounding, {arm.name}"))
        return [kl for kl in found if kl is not None]

    def served(
        self, profile: ReuseProfile, cases: Iterable[Case], bound: ProfileBound | None, title: str
    ) -> list[Sample]:
        """Return the answers under policy verified with the profile, within one of its bounds; None: it has none.
        Raises SemBlendError if the engine refuses the profile."""
        asked = {} if bound is None else {"SEMBLEND_MAX_KL": str(bound.max_kl), "SEMBLEND_RISK": str(bound.risk)}
        with tempfile.TemporaryDirectory(prefix="trial-") as folder:
            path = Path(folder) / PROFILE_NAME
            profile.write(path)
            choices = ArmChoices(self._layers, boundary=1, profile=path, profile_layers=full_layers_of(profile))
            [arm] = arms_of([VERIFIED], choices)
            variables = {**(arm.variables or {}), **asked, "SEMBLEND_PROFILE_TRIAL": "1"}
            found = self._samples(replace(arm, variables=variables), cases, title)
        check_profile_was_tried(found)
        return found

    def observations(
        self, profile: ReuseProfile, cases: Sequence[Case], shares: Sequence[float], title: str
    ) -> list[Observation]:
        """Return what each share does to the prompts of which a check compared something; the other prompts had
        nothing to move. Raises SemBlendError if the engine refuses the profile."""
        trials = [(trial_of(profile, share), f"{title}, {share:.0%} computed") for share in shares]
        by_share = [self.served(trial, cases, trial.bounds[0], name) for trial, name in trials]
        return [
            Observation(each[0].workload, each[0].group, each[0].sampled_deviation, tuple(map(distance_of, each)))
            for each in zip(*by_share, strict=True)
            if each[0].sampled_tokens
        ]

    def _samples(self, arm: Arm, cases: Iterable[Case], title: str) -> list[Sample]:
        asked = [self._cases[case.id] for case in cases]
        with progress(title, len(asked)) as on_step:
            return self._server.samples(replace(arm, isolated=True), asked, on_step) if asked else []


def trial_of(profile: ReuseProfile, share: float) -> ReuseProfile:
    """Return the profile with one bound, which computes `share` of the checked tokens at any deviation."""
    levels = [ProfileLevel(deviation=_ANY_DEVIATION, share=share)]
    bound = ProfileBound(max_kl=_TRIAL_KL, risk=_TRIAL_RISK, levels=levels)
    return profile.model_copy(update={"bounds": [bound]})


def check_profile_was_tried(samples: Iterable[Sample]) -> None:
    """Raise SemBlendError if the engine took no plan, for a reason that is not one prompt's."""
    for sample in samples:
        if "profile" in (sample.reason or ""):
            raise SemBlendError(
                f"Case {sample.case_id}: the engine does not take the profile that is tried ({sample.reason}); what "
                "differs is in its log."
            )
        if sample.reason is not None and sample.reason not in _OF_ONE_PROMPT:
            raise SemBlendError(
                f"Case {sample.case_id}: the engine executes no plans ({sample.reason}), so that nothing can be "
                "calibrated in it; its log says why."
            )
