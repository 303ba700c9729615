"""Prepared: the engine, the families and the prompts that a calibration or a confirmation serves."""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine_wrapper.embedded.request import SamplingParams
from kernels.layout import KvGeometry
from semblend_trt.errors import ConfigurationError
from semblend_trt.namespace import CacheNamespace
from semblend_trt.reuse_profile import ReuseProfile
from validation import arguments, models
from validation.arms import WRAPPER_WITHOUT_PLAN, ArmChoices, arms_of
from validation.calibration.deviations import DeviationCollector
from validation.calibration.observer import Observer
from validation.calibration.planter import PLANTED, TRIES, Planter, write_plants
from validation.cases import Case, Tokeniser, groups
from validation.engines import Engines, EngineSettings, opened
from validation.families.catalog import Kind, family, write_cases
from validation.measurement import ServingSettings
from validation.prompts import form_for

PROMPT_OPTIONS = ("groups", "questions", "tokens", "seed", "max_tokens", "min_match_length")
_PROBE_TOKENS = 128


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
                continue
            tries = 1 if profile is None else TRIES
            plants = write_plants(self.engines, replace(asked, first=first * tries), [name], count * tries)
            found += (
                plants
                if profile is None
                else Planter(self.collector, self.tokeniser.tokenise).hardest(plants, profile, count)
            )
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
        return DeviationCollector(model, self.engines.facts, self.settings.min_span, kv_dtype)

    @functools.cached_property
    def tokeniser(self) -> Tokeniser:
        return Tokeniser(self.engines, self.settings.max_tokens)


def identity_of(engines: Engines, settings: ServingSettings) -> tuple[CacheNamespace, KvGeometry]:
    """Return an engine's namespace and geometry from its audit log, as the connector may be in another process. Raises
    ConfigurationError with the reason if the connector refuses the engine, and SemBlendError."""
    [arm] = arms_of([WRAPPER_WITHOUT_PLAN], ArmChoices(engines.facts.num_layers, boundary=1))
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
