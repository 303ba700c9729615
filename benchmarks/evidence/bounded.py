"""How far answers are from cold's under stated bounds, on SmolLM2, beside other choices of what is computed.

`python -m benchmarks.evidence.bounded --model smollm2` runs four --parts. Under `frontier`, more and more tokens are
computed. Their choices: the profile's check, one that compares all tokens in its lowest layers, attention alone,
chance, CacheBlend and EPIC. `plot` draws it. --kept holds what was served, and the next call goes on from there.
Other options are those of `python -m validation calibrate`."""

import gzip
import json
import math
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.program import FOLDER, parser_of
from engine_wrapper.deviation_check import Budget
from semblend_trt.files import write_bytes
from semblend_trt.reuse_profile import ReuseProfile
from validation import models
from validation.arms import POSITION_FIX, ROUNDING_ARMS, Arm, ArmChoices, arms_of
from validation.calibration.bound import LEAST, Observation, bounds_of, distance_of, what_if
from validation.calibration.calibration import FRESH, Calibration, parse_calibrate, teller
from validation.calibration.prepared import Observer, Prepared, trial_of
from validation.cases import Case, grouped
from validation.results import Results, say
from validation.samples import Sample

NAME, POINTS, SUFFIX = "smollm2", "smollm2_frontier.jsonl", ".json.gz"
KLS = {"rounding": None, "0.01": 0.01, "0.05": 0.05}  # None is twice the rounding floor
SHARE_GOALS = {"0.01_volatile": 0.03, "0.01_instruction": 0.12, "0.01_headings": 0.28, "0.01_replaced": 0.40}
# A family, a computed share, and the goal of the mean KL there.
POINT_GOALS = {"another_order_quarter": ("order", 0.25, 0.012), "headings_fifth": ("headings", 0.20, 0.0009)}
SMALL = ("--groups", "8", "--tokens", "512", "--max-tokens", "8", "--risk", "0.7", "--shares", "0,0.3")
FLOORS = tuple(arm.name for arm in ROUNDING_ARMS)
FLOOR, OURS, ALL, BLEND = "floor", "profile", "all_tokens", "cacheblend"
LADDERS = {OURS: (0.0, 0.05, 0.1, 0.2, 0.35, 0.6), BLEND: (5, 15, 30), "epic": (8, 32)}
LADDERS |= {ALL: (0.05, 0.2), "attention": (0.1, 0.3), "random": (0.1, 0.3)}
# `Budget.chosen` takes the largest products of deviation and attention; each of the rules replaces it.
_chosen = Budget.chosen
RULES: dict[str, Callable[[Budget, Any], Any]] = {
    OURS: _chosen,
    ALL: _chosen,
    "attention": lambda budget, deviations: _chosen(budget, np.ones_like(deviations)),
    "random": lambda budget, found: np.random.default_rng(0).permutation(len(found)) < round(budget.share * len(found)),
}


class Point(NamedTuple):
    """An arm in one family: its computed share of the offered tokens x layers, and its mean KL in nats."""

    family: str
    arm: str
    kind: str
    share: float
    kl: float
    prompts: int


class Recorder(Observer):
    """Keeps every arm's samples in a file of `folder`, and serves only what is not there yet."""

    def __init__(self, prepared: Prepared, cases: Sequence[Case], folder: Path) -> None:
        super().__init__(prepared.engines, cases, prepared.settings)
        self._folder = folder

    def observations(self, profile: ReuseProfile, *given: Any, **named: Any) -> list[Observation]:
        """Do as Observer does; keep the last ones, which decide, with the profile that has no bounds yet."""
        found = super().observations(profile, *given, **named)
        profile.write(self._folder / "base.json")
        write_bytes(self._folder / "observations.json", json.dumps([asdict(each) for each in found]).encode())
        return found

    def _samples(self, arm: Arm, cases: Iterable[Case], title: str) -> list[Sample]:
        path, asked, began = self._folder / (re.sub(r"[^\w.]+", "-", title) + SUFFIX), list(cases), time.perf_counter()
        seconds, found = _kept(path)
        if missing := [case for case in asked if case.id not in found]:
            found |= {each.case_id: each for each in super()._samples(arm, missing, title)}
            bare = [asdict(replace(each, answer="", reference=None, spans=())) for each in found.values()]
            write_bytes(path, gzip.compress(json.dumps([seconds + time.perf_counter() - began, bare]).encode()))
        return [found[case.id] for case in asked]


def calibrate(asked: Namespace, options: Namespace, rows: Results) -> None:
    """Make the profile; add its time, with that of earlier calls, and what the bounds of other families do to each."""
    folder, shares = options.kept / "calibrate", tuple(float(each) for each in asked.shares.split(","))
    began, said = time.perf_counter() - sum(_kept(path)[0] for path in folder.glob(f"*{SUFFIX}")), rows.measured.command
    with mock.patch.object(Prepared, "observer", lambda prepared, cases: Recorder(prepared, cases, folder)):
        run = Calibration(Prepared(asked, asked.dtype), shares, asked.risk, asked.max_tries, said, teller())
        (profile := run.run()).write(options.kept / "profile.json")
    how = f"{asked.groups} groups of {len(run.prepared.names)} families; {len(profile.bounds)} bounds are shown"
    rows.add(f"calibrate_{NAME}_minutes", (time.perf_counter() - began) / 60.0, "minutes", how, 10.0)
    [floor] = [each["floor"] for each in run.figures if each["what"] == "rounding"]
    observed = [Observation(**each) for each in json.loads((folder / "observations.json").read_bytes())]
    fit = {each.group for each in observed if int(each.group.rpartition("-")[2]) < run.fitted}
    for family, own in grouped(observed, attrgetter("family")).items():
        others = [each for each in observed if each.family != family]
        first, second = ([each for each in others if (each.group in fit) is is_fit] for is_fit in (True, False))
        for name, kl in ((name, kl or 2.0 * floor) for name, kl in KLS.items()):
            [bound] = bounds_of(first, second, shares, [kl], asked.risk)
            if bound.levels:
                found = what_if(own, shares, bound.levels, kl)[family]
                shown = f"{found.groups} prompts, within {kl:.2g} nats; computed share {found.share:.2f}"
                title = f"{NAME}_bound_broken_left_out_{family}_{name}"
                rows.add(title, found.misses / found.groups, "share", f"{shown}; levels of the other families")
            else:
                say(f"{family} left out: the other families show no bound of {name}, so there is no row")


def bounds(asked: Namespace, options: Namespace, rows: Results) -> None:
    """Serve new prompts within the profile's bounds; add how many are over them, and what was computed."""
    profile, risk = ReuseProfile.read(options.kept / "profile.json"), asked.risk
    folder = options.kept / f"bounds-{str(profile.digest)[:8]}"
    found = {name: profile.bound_for(kl or "rounding", risk) for name, kl in KLS.items()}
    say(f"bounds that the profile lacks have no rows: {[name for name, bound in found.items() if bound is None]}")
    for recorder, cases in _fresh(asked, options, folder):
        for name, bound in found.items():
            if bound is not None:
                recorder.served(profile, cases, bound, name)
    for name, kl in ((name, kl or 2.0 * (profile.floor or 0.0)) for name, kl in KLS.items()):
        samples = (each for each in _kept(folder / f"{name}{SUFFIX}")[1].values() if each.sampled_tokens)
        for family, moved in grouped(samples, attrgetter("workload")).items():
            over, share = sum(not distance_of(each) <= kl for each in moved), fmean(map(_computed, moved))
            how = f"{len(moved)} prompts, within {kl:.2g} nats; computed share {share:.2f} of offered tokens x layers"
            most = risk + 2.0 * math.sqrt(risk * (1.0 - risk) / len(moved))
            rows.add(f"{NAME}_bound_broken_{family}_{name}", over / len(moved), "share", how, most)
            named = f"{NAME}_computed_share_at_{name}_{family}"
            rows.add(named, share, "share", how, SHARE_GOALS.get(f"{name}_{family}"))


def frontier(asked: Namespace, options: Namespace, rows: Results) -> None:
    """Serve new prompts under all arms; write their points, and add what the choice of tokens is worth."""
    base = ReuseProfile.read(options.kept / "calibrate" / "base.json")
    assert base.check is not None
    folder = options.kept / f"frontier-{base.check.layer}-{base.head_tokens}"
    names = [f"{kind}_{each:g}" for kind in LADDERS if kind not in RULES for each in LADDERS[kind]]
    plain = arms_of([POSITION_FIX, *names], ArmChoices(base.geometry.num_layers, boundary=1))
    for recorder, cases in _fresh(asked, options, folder):
        for arm in (*ROUNDING_ARMS, *plain):
            recorder._samples(arm, cases, arm.name)
        for kind, rule in RULES.items():
            check = base.check.model_copy(update={"compares_all": kind == ALL or base.check.compares_all})
            for share in LADDERS[kind]:
                trial = trial_of(base.model_copy(update={"check": check}), share)
                with mock.patch.object(Budget, "chosen", rule):
                    recorder.served(trial, cases, trial.bounds[0], f"{kind}_{share:g}")
    lines = list[str]()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        arm = path.name.removesuffix(SUFFIX)
        kind = FLOOR if arm in FLOORS else next((kind for kind in LADDERS if arm.startswith(f"{kind}_")), arm)
        for family, asked_of in grouped(_kept(path)[1].values(), attrgetter("workload")).items():
            own = [each for each in asked_of if each.offered_tokens or kind == FLOOR]
            # A budget that leaves too little to save has plans for few prompts, which are not like the others.
            if 2 * len(own) < len(asked_of):
                continue
            share = 1.0 if kind == FLOOR else fmean(map(_computed, own))
            lines.append(json.dumps((family, arm, kind, share, fmean(map(distance_of, own)), len(own))) + "\n")
    write_bytes(options.json / POINTS, "".join(lines).encode())
    for family, points in _by_family(options.json / POINTS).items():
        add_frontier(family, points, rows)


def plot(_: Namespace, options: Namespace, __: Results) -> None:
    """Draw KL against computed share, a panel a family; equal points give an equal file."""
    families = _by_family(options.json / POINTS)
    figure = Figure(figsize=(14, 10), layout="constrained")
    for index, (family, points) in enumerate(families.items(), start=1):
        axes = figure.add_subplot(-(-len(families) // 4), 4, index)
        for kind in (*LADDERS, POSITION_FIX):
            line = np.array(sorted((100.0 * each.share, max(each.kl, LEAST)) for each in points.get(kind, [])))
            axes.plot(*line.reshape(-1, 2).T, "o-", markersize=3, linewidth=1, label=kind)
        axes.axhline(max(fmean(each.kl for each in points[FLOOR]), LEAST), color="0.5", label=FLOOR)
        axes.set(yscale="log", title=family, xlabel="computed, %", ylabel="mean KL, nats")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    with rc_context({"svg.hashsalt": NAME, "svg.fonttype": "none"}):
        figure.savefig((options.json / POINTS).with_suffix(".svg"), metadata={"Date": None})


def _fresh(asked: Namespace, options: Namespace, folder: Path) -> Iterator[tuple[Recorder, list[Case]]]:
    """Yield new prompts of each family: calibrations and confirmations have lower seeds."""
    asked.groups, asked.questions = options.test
    prepared = Prepared(asked, asked.dtype)
    cases = prepared.cases(asked.seed + 3 * FRESH, 0, asked.groups)
    # New engines serve each question, where those of a group find no KV of each other.
    for first in range(asked.questions):
        yield Recorder(prepared, own := cases[first :: asked.questions], folder), own


def add_frontier(family: str, points: dict[str, list[Point]], rows: Results) -> None:
    """Add what the choice of tokens is worth in one family."""
    floor, ours, unchecked = fmean(each.kl for each in points[FLOOR]), points[OURS], points[POSITION_FIX][0]
    what = f"{unchecked.prompts} prompts; unchecked {unchecked.kl:.2g}, floor {floor:.2g} nats"
    if family == "volatile":
        rows.add(f"{NAME}_kl_volatile_unchecked", unchecked.kl, "nats", what, floor)
    for name, (wanted, share, goal) in POINT_GOALS.items():
        if family == wanted and (kl := kl_at(ours, share)) is not None:
            rows.add(f"{NAME}_kl_{name}", kl, "nats", f"at {share:g} of the offered tokens x layers, {what}", goal)
    ratios = {each.arm: kl / each.kl for each in points[BLEND] if (kl := kl_at(ours, each.share)) is not None}
    if unchecked.kl > 3.0 * floor and f"{BLEND}_15" in ratios:
        said = f"as {BLEND}_15 computes; over all: {', '.join(f'{arm} {ratio:.2f}' for arm, ratio in ratios.items())}"
        rows.add(f"{NAME}_selection_kl_over_{BLEND}_{family}", ratios[f"{BLEND}_15"], "ratio", f"{said}; {what}", 0.5)


def kl_at(points: Iterable[Point], share: float) -> float | None:
    """Return the KL at a computed share, its logarithm interpolated; None outside of the points."""
    shares, kls = zip(*sorted((each.share, max(each.kl, LEAST)) for each in points), strict=True)
    return math.exp(np.interp(share, shares, np.log(kls))) if shares[0] <= share <= shares[-1] else None


def _computed(sample: Sample) -> float:
    """Return the share of the offered tokens x layers."""
    tokens = sample.prompt_tokens - sample.exact_prefix_tokens
    return 1.0 - (1.0 - sample.computed_share) * tokens / sample.offered_tokens


def _by_family(path: Path) -> dict[str, dict[str, list[Point]]]:
    points = [Point(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {family: grouped(own, attrgetter("kind")) for family, own in grouped(points, attrgetter("family")).items()}


def _kept(path: Path) -> tuple[float, dict[str, Sample]]:
    seconds, samples = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else (0.0, [])
    return seconds, {each["case_id"]: Sample(**each) for each in samples}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for."""
    parser = parser_of(__doc__, FOLDER)
    parts = {each.__name__: each for each in (calibrate, bounds, frontier, plot)}
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--kept", type=Path, default=Path("results/bounded"), help="folder of what was served")
    parser.add_argument("--test", type=int, nargs=2, default=(100, 3), help="groups and questions in each, of a family")
    parser.add_argument("--small", action="store_true", help="a dry run of few short prompts")
    options, others = parser.parse_known_args(arguments)
    asked = parse_calibrate([*(SMALL if options.small else ()), *others])
    asked.model = str(models.smollm2_folder()) if asked.model == models.SMOLLM2 else asked.model
    for part in options.parts:
        rows = Results(arguments, asked.device, dry=options.small)
        options.json = options.json or FOLDER / str(rows.measured.machine["name"])
        parts[part](asked, options, rows)
        if rows.rows:
            rows.write(options.json, f"{NAME}_{part}")


if __name__ == "__main__":
    main()
