"""`python -m validation calibrate`: finds what a model may reuse, and writes its reuse profile."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from semblend_trt.errors import ConfigurationError
from semblend_trt.reuse_profile import ReuseProfile
from validation import jsonl, machine, models
from validation.arms import WRAPPER_WITHOUT_PLAN, ArmChoices, arms_of
from validation.calibration.figures import figures_of
from validation.calibration.own_prompts import halves, scored_cases
from validation.calibration.search import Search
from validation.calibration.trials import Trials
from validation.engines import EngineSettings, open_engine
from validation.families.catalog import Kind, family
from validation.files import check_writable
from validation.jsonl import read_cases
from validation.quality.command import batch_settings, family_request
from validation.quality.family_cases import write_cases

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from engine_wrapper.embedded.model_runner import ModelRunner
    from kernels.layout import KvGeometry
    from semblend_trt.namespace import CacheNamespace
    from validation.calibration.candidates import Candidate
    from validation.calibration.search import Found
    from validation.cases import Case
    from validation.quality.batches import BatchSettings
    from validation.quality.family_cases import FamilyRequest

_PROBE_TOKENS = 128


def run_calibrate(options: argparse.Namespace, command: str) -> bool:
    """Runs the search and writes the profile; True when it allows reuse beyond exact spans.

    Raises SemBlendError and OSError.
    """
    began = time.perf_counter()
    check_writable(options.output)
    settings, asked = _checked(options)
    own = [] if options.prompts is None else scored_cases(read_cases(options.prompts), options.prompts)
    torch.manual_seed(options.seed)
    runner = models.load(options.model, options.device, options.dtype)
    console = Console(soft_wrap=True)

    def tell(sentence: str) -> None:
        console.print(f"{time.perf_counter() - began:6.0f} s  {sentence}", markup=False, highlight=False)

    namespace, geometry = _identity(runner, settings)

    def profile_of(candidate: Candidate | None, found: Found | None = None) -> ReuseProfile:
        return ReuseProfile.made_for(
            namespace,
            geometry,
            policy="exact" if candidate is None else candidate.policy,
            check=None if candidate is None else candidate.check,
            boundary=0 if candidate is None else candidate.boundary,
            head_tokens=0 if candidate is None else candidate.head_tokens,
            figures=[] if found is None else figures_of(found, settings.min_span),
            versions=machine.versions(),
            command=command,
        )

    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        path = Path(folder) / models.PROFILE_NAME

        def written(candidate: Candidate) -> Path:
            profile_of(candidate).write(path)
            return path

        found = _search(runner, settings, asked, options, own, written, tell).run()
    profile_of(found.winner, found).write(options.output)
    _show(found, options.output, tell)
    return found.winner is not None


def _checked(options: argparse.Namespace) -> tuple[BatchSettings, FamilyRequest]:
    for name in ("screening_groups", "max_tries"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1.")
    asked = family_request(options)
    names = [name for name in asked.family_names() if family(name).kind in (Kind.HARMLESS, Kind.TRAP)]
    if not names:
        raise ConfigurationError(f"--families {options.families} has neither a harmless family nor a trap; name both.")
    # What a candidate is likely to fail comes first, so that little is served under those that do.
    names.sort(key=lambda name: family(name).kind is not Kind.TRAP)
    return batch_settings(options), replace(asked, names=tuple(names))


def _search(
    runner: ModelRunner,
    settings: BatchSettings,
    asked: FamilyRequest,
    options: argparse.Namespace,
    own: list[Case],
    written: Callable[[Candidate], Path],
    tell: Callable[[str], None],
) -> Search:
    choosing, confirming = halves(own)

    def trials(seed: int, groups: int, extra: list[Case]) -> Trials:
        cases: dict[str, list[Case]] = {}
        for case in [*write_cases(runner, replace(asked, seed=seed, groups=groups)), *extra]:
            cases.setdefault(case.workload, []).append(case)
        return Trials(runner, cases, settings, seed)

    kinds = {name: family(name).kind.value for name in asked.names}
    if own:
        kinds[jsonl.WORKLOAD] = Kind.HARMLESS.value
    return Search(
        runner=runner,
        min_span=settings.min_span,
        kinds=kinds,
        screening=trials(asked.seed, options.screening_groups, choosing),
        fresh=lambda number: trials(asked.seed + 1 + number, asked.groups, confirming),
        written=written,
        max_tries=options.max_tries,
        tell=tell,
    )


def _identity(runner: ModelRunner, settings: BatchSettings) -> tuple[CacheNamespace, KvGeometry]:
    """The namespace and geometry of an engine over this model, as its connector sees them."""
    [arm] = arms_of([WRAPPER_WITHOUT_PLAN], ArmChoices(runner.facts.num_layers, boundary=1))
    engine = open_engine(
        arm, EngineSettings(settings.model, 2 * _PROBE_TOKENS, 1 << 20, settings.min_span), runner, None
    )
    try:
        engine.generate([[0] * _PROBE_TOKENS])
        namespace = engine.connector_scheduler.namespace
        geometry: KvGeometry = engine.executor.pool.geometry
    finally:
        engine.shutdown()
    if namespace is None:
        raise ConfigurationError(
            f"The connector refuses to serve {settings.model}; its log says why, and no profile can change it."
        )
    return namespace, geometry


def _show(found: Found, output: Path, tell: Callable[[str], None]) -> None:
    if found.problem is not None:
        tell(f"nothing can be shown: {found.problem}")
    for line in found.lines:
        bounds = [bound.sentence() for bound in (line.exact_match_bound, line.loss_bound) if bound is not None]
        share = "nothing offered" if line.reused_share is None else f"{line.reused_share:.1%} of the offered reused"
        tell(f"{line.family}: {'; '.join(bounds)}; {share}, largest deviation kept {line.largest_kept:.4f}")
    allowed = "exact spans only" if found.winner is None else found.winner.name
    tell(f"the profile allows {allowed}")
    tell(str(output))
