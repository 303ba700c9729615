"""The engine, the families and the prompts that a calibration or a confirmation serves, and the observer that serves
them cold and under trial profiles, and says how far reuse moved each answer from cold's."""

import argparse
import functools
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine_wrapper.embedded.request import SamplingParams
from kernels.layout import KvGeometry
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.namespace import CacheNamespace
from semblend_trt.reuse_profile import ProfileBound, ProfileLevel, ReuseProfile
from validation import arguments, models
from validation.arms import ROUNDING_ARMS, VERIFIED, WRAPPER_WITHOUT_PLAN, Arm, ArmChoices, arm_of
from validation.calibration.bound import Observation, distance_of
from validation.calibration.deviations import PLANTED, TRIES, DeviationCollector, write_plants
from validation.cases import Case, groups
from validation.engines import Engines, EngineSettings, opened
from validation.families.catalog import Kind, family, write_cases
from validation.measurement import BatchServer, ServingSettings
from validation.models import PROFILE_NAME, full_layers_of
from validation.prompts import form_for
from validation.samples import Sample

PROMPT_OPTIONS = ("groups", "questions", "tokens", "seed", "max_tokens", "min_match_length")
_PROBE_TOKENS = 128
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
        self._server = BatchServer(engines, bare, settings)

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
            arm = arm_of(VERIFIED, choices)
            variables = {**(arm.variables or {}), **asked, "SEMBLEND_PROFILE_TRIAL": "1"}
            found = self._samples(replace(arm, variables=variables), cases, title)
        check_profile_was_tried(found)
        return found

    def observations(
        self, profile: ReuseProfile, cases: Sequence[Case], shares: Sequence[float], title: str
    ) -> list[Observation]:
        """Return what each share does to the prompts of which a check compared something. Raises as `served`."""
        trials = [(trial_of(profile, share), f"{title}, {share:.0%} computed") for share in shares]
        by_share = [self.served(trial, cases, trial.bounds[0], name) for trial, name in trials]
        return [
            Observation(each[0].workload, each[0].group, each[0].sampled_deviation, tuple(map(distance_of, each)))
            for each in zip(*by_share, strict=True)
            if each[0].sampled_tokens
        ]

    def _samples(self, arm: Arm, cases: Iterable[Case], title: str) -> list[Sample]:
        asked = [self._cases[case.id] for case in cases]
        with arguments.progress(title, len(asked)) as on_step:
            return self._server.samples(replace(arm, isolated=True), asked, on_step) if asked else []


def trial_of(profile: ReuseProfile, share: float) -> ReuseProfile:
    """Return the profile with one bound, which computes `share` of the checked tokens at any deviation."""
    levels = [ProfileLevel(deviation=_ANY_DEVIATION, share=share)]
    bound = ProfileBound(max_kl=_TRIAL_KL, risk=_TRIAL_RISK, levels=levels)
    return profile.model_copy(update={"bounds": [bound]})


def check_profile_was_tried(samples: Iterable[Sample]) -> None:
    """Raise SemBlendError if the engine took no plan, for a reason that is not one prompt's."""
    for sample in samples:
        reason = sample.reason
        if reason is not None and reason not in _OF_ONE_PROMPT:
            why = f"executes no plans ({reason}), so that nothing can be calibrated in it; its log says why."
            if "profile" in reason:
                why = f"does not take the profile that is tried ({reason}); what differs is in its log."
            raise SemBlendError(f"Case {sample.case_id}: the engine {why}")


class Prepared:
    """Engine, families and cases that both commands serve. Raises ConfigurationError and UnsupportedModelError."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        self._options, self._dtype = options, dtype
        self.settings = arguments.serving_settings(options)
        self._asked = arguments.family_request(options)
        torch.manual_seed(options.seed)
        self.engines = models.engines_of(options, dtype)
        self._own = groups(arguments.own_cases(options, self.engines.tokenizer))
        self.form = form_for(self.engines.tokenizer, options.form)
        names = self._asked.family_names(has_marks=self.form.has_marks)
        self.names = [name for name in names if family(name).kind in (Kind.HARMLESS, Kind.TRAP)]
        if not self.names:
            raise ConfigurationError(
                f"--families {','.join(self._asked.names)} has neither a harmless family nor a trap; name one."
            )
        self.namespace, self.geometry = identity_of(self.engines, self.settings)
        self.prompts = {name: getattr(options, name) for name in PROMPT_OPTIONS}

    def cases(self, seed: int, first: int, count: int, profile: ReuseProfile | None = None) -> list[Case]:
        """Return `count` groups of each family from `first` on; with a profile the plants that its policy misses."""
        found = list[Case]()
        for name in self.names:
            asked = replace(self._asked, names=(name,), seed=seed, first=first, groups=count)
            if name != PLANTED:
                found += write_cases(self.engines, asked)
            elif profile is None:
                found += write_plants(self.engines, asked)
            else:
                plants = write_plants(self.engines, replace(asked, first=first * TRIES, groups=count * TRIES))
                found += self.collector.hardest(plants, profile, count)
        return found

    def own(self, *quarters: int) -> list[Case]:
        """Return these quarters, 0 to 3, of the user's own groups, family by family."""
        found, number = list[Case](), Counter[str]()
        for group in self._own:
            number[group[0].workload] += 1
            found += group if number[group[0].workload] % 4 in quarters else []
        return found

    def observer(self, cases: Sequence[Case]) -> Observer:
        return Observer(self.engines, cases, self.settings)

    @functools.cached_property
    def collector(self) -> DeviationCollector:
        options = self._options
        model = models.transformers_model(self.engines, options.model, options.device, self._dtype)
        kv_dtype = torch.float8_e4m3fn if "float8" in self.namespace.kv_dtype else None
        return DeviationCollector(model, self.engines, self.settings.min_span, kv_dtype)


def identity_of(engines: Engines, settings: ServingSettings) -> tuple[CacheNamespace, KvGeometry]:
    """Return an engine's namespace and geometry from its audit log, as the connector may be in another process. Raises
    ConfigurationError with the reason if the connector refuses the engine, and SemBlendError."""
    arm = arm_of(WRAPPER_WITHOUT_PLAN, ArmChoices(engines.facts.num_layers, boundary=1))
    asked = EngineSettings(settings.model, 2 * _PROBE_TOKENS, 1 << 20, settings.min_span)
    with opened(engines, arm, asked) as (engine, audit):
        engine.generate([[0] * _PROBE_TOKENS], SamplingParams(max_tokens=1))
    events = {event["event"]: event for event in audit.events}
    compared = events.get("profile_compared")
    if compared is None:
        refusal = events.get("scheduler_initialized", {}).get("refusal")
        raise ConfigurationError(
            f"The connector refuses to serve {settings.model} ({refusal or 'the reason is in the engine log'}), and no "
            "profile can change it."
        )
    return CacheNamespace.from_dict(compared["namespace"]), KvGeometry(**compared["geometry"])
