"""`python -m validation calibrate`: finds what a model may reuse, and writes its reuse profile."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.results import versions
from semblend_trt.errors import ConfigurationError
from semblend_trt.printable import printable
from semblend_trt.reuse_profile import ReuseProfile
from validation import jsonl, models
from validation.arguments import check_integers
from validation.calibration.deviations import DeviationCollector
from validation.calibration.engine_identity import identity_of
from validation.calibration.figures import PROMPT_OPTIONS, figures_of
from validation.calibration.own_prompts import halves, scored_cases
from validation.calibration.plants import PLANTED, write_plants
from validation.calibration.search import Search
from validation.calibration.trials import Trials
from validation.families.catalog import Kind, family
from validation.files import check_writable
from validation.jsonl import read_cases
from validation.quality.arguments import batch_settings, family_request
from validation.quality.family_cases import write_cases

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from validation.calibration.candidates import Candidate
    from validation.calibration.search import Found
    from validation.cases import Case
    from validation.engines import Engines
    from validation.quality.batches import BatchSettings
    from validation.quality.family_cases import FamilyRequest
    from validation.quality.samples import QualityLine


def run_calibrate(options: argparse.Namespace, command: str) -> bool:
    """Runs the search and writes the profile; True when it allows reuse beyond exact spans.

    Raises SemBlendError and OSError.
    """
    check_writable(options.output)
    check_integers(options, screening_groups=1, max_tries=1, plants=1)
    settings, asked = batch_settings(options), bound_families(family_request(options))
    own = [] if options.prompts is None else scored_cases(read_cases(options.prompts), options.prompts)
    torch.manual_seed(options.seed)
    engines = models.engines_of(options.engine, options.model, options.device, options.dtype)
    model = models.transformers_model(engines, options.model, options.device, options.dtype)
    collector = DeviationCollector(model, engines.facts, settings.min_span)
    tell = teller()
    namespace, geometry = identity_of(engines, settings)
    prompts = {name: getattr(options, name) for name in PROMPT_OPTIONS}

    def profile_of(candidate: Candidate | None, found: Found | None = None) -> ReuseProfile:
        return ReuseProfile.made_for(
            namespace,
            geometry,
            policy="exact" if candidate is None else candidate.policy,
            check=None if candidate is None else candidate.check,
            boundary=0 if candidate is None else candidate.boundary,
            head_tokens=0 if candidate is None else candidate.head_tokens,
            figures=[] if found is None else figures_of(found, prompts),
            versions=versions(),
            command=command,
        )

    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        path = Path(folder) / models.PROFILE_NAME

        def written(candidate: Candidate) -> Path:
            profile_of(candidate).write(path)
            return path

        found = _search(collector, engines, settings, asked, options, own, written, tell).run()
    profile_of(found.winner, found).write(options.output)
    _show(found, options.output, tell)
    return found.winner is not None


def teller() -> Callable[[str], None]:
    """Prints sentences behind the seconds since now."""
    began = time.perf_counter()

    def tell(sentence: str) -> None:
        sys.stdout.write(printable(f"{time.perf_counter() - began:6.0f} s  {sentence}") + "\n")
        sys.stdout.flush()

    return tell


def bound_families(asked: FamilyRequest) -> FamilyRequest:
    """The same request for the families of it that bound a loss, traps first. Raises ConfigurationError without any."""
    names = [name for name in asked.family_names() if family(name).kind in (Kind.HARMLESS, Kind.TRAP)]
    if not names:
        raise ConfigurationError(
            f"--families {','.join(asked.names)} has neither a harmless family nor a trap; name both."
        )
    # What a candidate is likely to fail comes first, so that little is served under those that do.
    names.sort(key=lambda name: family(name).kind is not Kind.TRAP)
    return replace(asked, names=tuple(names))


def bound_cases(engines: Engines, asked: FamilyRequest, plants: int) -> list[Case]:
    """The cases of the families, and of the planter's family so many `plants`."""
    others = tuple(name for name in asked.names if name != PLANTED)
    planted = write_plants(engines, asked, [PLANTED], plants) if PLANTED in asked.names else []
    return [*(write_cases(engines, replace(asked, names=others)) if others else []), *planted]


def kinds_of_families(asked: FamilyRequest, own: Sequence[Case]) -> dict[str, str]:
    """The kind of each family asked for; the user's own cases are harmless."""
    kinds = {name: family(name).kind.value for name in asked.names}
    return {**kinds, jsonl.WORKLOAD: Kind.HARMLESS.value} if own else kinds


def _search(
    collector: DeviationCollector,
    engines: Engines,
    settings: BatchSettings,
    asked: FamilyRequest,
    options: argparse.Namespace,
    own: list[Case],
    written: Callable[[Candidate], Path],
    tell: Callable[[str], None],
) -> Search:
    choosing, confirming = halves(own)

    def trials(seed: int, groups: int, extra: list[Case]) -> Trials:
        cases = bound_cases(engines, replace(asked, seed=seed, groups=groups), options.plants)
        return Trials(engines, [*cases, *extra], settings, seed, collector)

    return Search(
        num_layers=engines.facts.num_layers,
        kinds=kinds_of_families(asked, own),
        screening=trials(asked.seed, options.screening_groups, choosing),
        fresh=lambda number: trials(asked.seed + 1 + number, asked.groups, confirming),
        written=written,
        max_tries=options.max_tries,
        tell=tell,
    )


def tell_lines(lines: Iterable[QualityLine], tell: Callable[[str], None]) -> None:
    """Tells of each family how it compares with cold, and what was reused."""
    for line in lines:
        bounds = [bound.sentence() for bound in (line.exact_match_bound, line.loss_bound) if bound is not None]
        share = "nothing offered" if line.reused_share is None else f"{line.reused_share:.1%} of the offered reused"
        tell(f"{line.family}: {'; '.join(bounds)}; {share}, largest deviation kept {line.largest_kept:.4f}")


def _show(found: Found, output: Path, tell: Callable[[str], None]) -> None:
    if found.problem is not None:
        tell(f"nothing can be shown: {found.problem}")
    tell_lines(found.lines, tell)
    allowed = "exact spans only" if found.winner is None else found.winner.name
    tell(f"the profile allows {allowed}")
    tell(str(output))
