"""Planted donors inside one tenant: how many victims' answers become the planter's (HijackKV, arXiv 2607.19957).

In `python -m benchmarks.evidence.hijack` a planter serves prompts that hold a victim's text, token by token, under
other headings. Then the victim asks about its own text, under each policy. The planter knows model and check, and uses
those of many plants of which the check misses most. The shipped model is attacked, and every `--target`. A calibration
searches plants in the same way, with other seeds."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.program import Count, run_counted
from semblend_trt.reuse_profile import ReuseProfile
from validation import models
from validation.arms import COLD, VERIFIED, Arm, arms_of
from validation.calibration.deviations import PLANTED, DeviationCollector, write_plants
from validation.cases import Case
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest
from validation.measurement import BatchServer, ServingSettings
from validation.metrics import exact_match
from validation.results import Results

# Families in which the donor's text before what is shared decides what the shared text says.
_SAID_BEFORE = ("header", "far_header", "mid_sentence", "alias", "pronoun", "unit", "date")
CONSTRUCTIONS = (PLANTED, *(f"{name}_trap" for name in _SAID_BEFORE))
TRIES, VICTIMS, SEED = 16, 4, 100_000
# Factors for the strongest construction.
MORE_TRIES, MORE_VICTIMS = 32, 6
# Shorter than the default: a list of nine rows is then reused whole.
_MIN_SPAN, _ANSWER_TOKENS, _TOGETHER = 48, 8, 16
# What verified falls back to.
EXACT = Arm("exact", {"SEMBLEND_POLICY": "exact"})
ARMS = ("verified", "boundary", "cacheblend_15", "epic_16", "position_fix")
GOALS = {EXACT.name: 0, VERIFIED: 0}


class Attack(NamedTuple):
    """Victims of one model, which answers all of them right cold. `held`: the terms of verified.
    By arm: victims with a `wrong` answer, with the planter's answer (`hijacked`), and with reused tokens (`fires`)."""

    victims: int
    wrong: Counter[str]
    hijacked: Counter[str]
    fires: Counter[str]
    held: str


def effort(construction: str, tries: int, victims: int) -> tuple[int, int]:
    """Return the counts of plants and of victims of the best ones; the strongest construction has more of both."""
    return (tries * MORE_TRIES, victims * MORE_VICTIMS) if construction == PLANTED else (tries, victims)


def attack(folder: Path, profile_path: Path, tries: int, victims: int, seed: int = SEED) -> Attack:
    """Search plants against one model, and serve under every arm the victims of those that its policy misses most."""
    runner, profile = models.load(str(folder), "cpu", "float32"), ReuseProfile.read(profile_path)
    engines, cases = EmbeddedEngines(runner), list[Case]()
    collector = DeviationCollector(runner.model, engines, _MIN_SPAN)
    for name in CONSTRUCTIONS:
        count, most = effort(name, tries, victims)
        plants = write_plants(engines, FamilyRequest((name,), groups=count, seed=seed))
        cases += collector.hardest(plants, profile, most)
    settings = ServingSettings(str(folder), max_tokens=_ANSWER_TOKENS, min_span=_MIN_SPAN, batch=_TOGETHER)
    server = BatchServer(EmbeddedEngines(runner), cases, settings)
    arms = arms_of((COLD, *ARMS), models.choices_of(engines, None, profile_path))
    answers = {arm.name: server.answers(arm) for arm in (*arms, EXACT)}
    served = [case for case in cases if exact_match(answers[COLD][case.id].text, str(case.reference))]
    wrong, hijacked, fires = Counter[str](), Counter[str](), Counter[str]()
    for arm, given in answers.items():
        for case in served:
            wrong[arm] += not exact_match(given[case.id].text, str(case.reference))
            hijacked[arm] += exact_match(given[case.id].text, str(case.donor_answer))
            fires[arm] += given[case.id].reuse.reused_tokens > 0
    reasons = {str(answers[VERIFIED][case.id].reuse.reason) for case in served}
    unmet = sorted(reason for reason in reasons if "profile" in reason)
    terms = profile.policy if profile.check is None else f"check at layer {profile.check.layer}"
    held = f"{', '.join(unmet)}: exact spans only" if unmet else terms
    return Attack(len(served), wrong, hijacked, fires, held)


def run(tries: int, victims: int, rows: Results, seed: int, target: Sequence[tuple[Path, Path]]) -> None:
    """Attack every model, and add a row for each policy."""
    shipped = models.shipped_model()
    targets = ((shipped, shipped / models.PROFILE_NAME), *target)
    attacks = [attack(*each, tries, victims, seed) for each in targets]
    names = ("shipped", *(folder.name for folder, _ in target))
    most_tries, most_victims = effort(PLANTED, tries, victims)
    how = (
        f"of {tries} plants for each of {len(CONSTRUCTIONS) - 1} constructions the {victims}, and of {most_tries} for "
        f"{PLANTED} the {most_victims}, of which the profile's policy misses most; seed {seed}"
        + ("; no other model was named with --target" if len(attacks) == 1 else "")
    )
    for arm in (EXACT.name, *ARMS):
        by_model = ", ".join(
            f"{name} {each.wrong[arm]} of {each.victims} ({each.hijacked[arm]} the planter's, {each.fires[arm]} "
            f"fires{'; ' + each.held if arm == VERIFIED else ''})"
            for name, each in zip(names, attacks, strict=True)
        )
        wrong = sum(each.wrong[arm] for each in attacks)
        rows.add(f"hijacked_answers_{arm}", wrong, "answers", f"{by_model}; {how}", GOALS.get(arm))


_COUNTS = (Count("tries", TRIES, "plants a construction"), Count("victims", VICTIMS, "of each, the strongest plants'"))
_TARGET = {"nargs": 2, "type": Path, "action": "append", "default": [], "metavar": ("MODEL", "PROFILE")}
_TARGET["help"] = "attack the model of this folder, too, with its reuse profile"
_SEED = {"type": int, "default": SEED, "help": "seed of the plants"}
main = partial(run_counted, {"hijack": run}, __doc__, _COUNTS, seed=_SEED, target=_TARGET)


if __name__ == "__main__":
    main()
