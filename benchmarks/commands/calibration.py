"""What a calibration owes to its prompts: one model, several seeds, and each profile on the next seed's prompts.

`python -m benchmarks.commands.calibration --name NAME --folder DIR` keeps the profiles, and those that hold on the
next seed's prompts, in DIR and makes what is not there, so that a run may be spread over several calls; `--at-once` is
how many seeds run side by side, and `--devices cuda:0,cuda:1` spreads them over two cards. What stands behind `--` goes
to every calibration, as `--model M --dtype bfloat16`. With margins or budgets of one's own it is a dry run.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.program import parser_of
from semblend_trt.policy import ReusePolicy
from semblend_trt.reuse_profile import ReuseProfile
from validation.families.catalog import Kind, family
from validation.results import Results

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEDS = 5
# Seeds of one calibration's confirmations follow its own.
_APART = 100
GOAL_SPREAD, GOAL_REUSED = 1.5, 0.8
_MODEL_OPTIONS = ("--model", "--engine", "--device", "--dtype", "--kv-dtype", "--batch")
_OWN_RULE = ("--margin", "--budget", "--groups", "--screening-groups", "--families", "--tokens")


def made(folder: Path, seeds: int, at_once: int, devices: Sequence[str], given: Sequence[str]) -> list[Path]:
    """The profiles of `seeds` calibrations, each confirmed on the next seed's prompts where it allows reuse; those that
    are in the folder are taken as they are. The `devices` take turns. Raises CalledProcessError for a command that ends
    with an error."""
    pairs = zip(given[::2], given[1::2], strict=False)
    of_model = [each for pair in pairs if pair[0] in _MODEL_OPTIONS for each in pair]
    paths = [folder / f"seed-{seed}.json" for seed in range(seeds)]

    def make(seed: int) -> None:
        path, confirmed = paths[seed], confirmed_of(paths[seed])
        place = ["--device", devices[seed % len(devices)]] if devices else []
        if not path.is_file():
            run_command(["calibrate", *given, *place, "--seed", str(_APART * seed), "--output", str(path)])
        if ReuseProfile.read(path).terms is not None and not confirmed.is_file():
            others = ["--seed", str(_APART * ((seed + 1) % seeds) + 1)]
            files = ["--profile", str(path), "--output", str(confirmed)]
            run_command(["confirm", *files, *of_model, *place, *others])

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(make, range(seeds)))
    return paths


def confirmed_of(path: Path) -> Path:
    """The file that is there once the profile of `path` holds on the next seed's prompts."""
    return path.with_suffix(".confirmed")


def run_command(command: Sequence[str]) -> None:
    """Runs one command of `python -m validation`, whose status 1 says that something is not shown to hold. Raises
    CalledProcessError for one that ends with an error."""
    arguments = [sys.executable, "-m", "validation", *command]
    code = subprocess.run(arguments, check=False).returncode
    if code not in (0, 1):
        raise subprocess.CalledProcessError(code, arguments)


def reused_share(profile: ReuseProfile) -> float:
    """Share of harmless families' tokens that the confirmed policy reused, of those that plans offered."""
    told: list[Any] = [each for each in profile.figures if isinstance(each, dict) and each.get("what") == "confirmed"]
    harmless = [each for each in told if family(each["family"]).kind is Kind.HARMLESS]
    offered = sum(each["offered_tokens"] for each in harmless)
    return sum(each["reused_tokens"] for each in harmless) / offered if offered else 0.0


def add_rows(rows: Results, name: str, profiles: Sequence[ReuseProfile], held: Sequence[bool]) -> None:
    """The rows of one model and dtype; `held`: whether each profile holds on the next seed's prompts."""
    chosen = [
        f"{profile.policy} at layer {profile.check.layer}" if profile.check is not None else profile.policy
        for profile in profiles
    ]
    alike = Counter(chosen).most_common(1)[0]
    told = f"{len(profiles)} seeds: " + ", ".join(f"{count} {each}" for each, count in Counter(chosen).items())
    rows.add(f"calibration_alike_{name}", alike[1] / len(chosen), "of seeds", told, 1.0, "higher")
    shares = [reused_share(profile) for profile in profiles if profile.policy == ReusePolicy.VERIFIED.value]
    allowed = len(shares) == len(profiles) and min(shares) >= GOAL_REUSED
    least = min(shares, default=0.0)
    told = f"verified for {len(shares)} of {len(profiles)} seeds; of harmless tokens at least {least:.3f} reused"
    rows.add(f"calibration_policy_{name}", float(allowed), "1: allowed", told, 1.0, "higher")
    thresholds = [profile.check.threshold for profile in profiles if profile.check is not None]
    if thresholds:
        told = ", ".join(f"{each:.4g}" for each in sorted(thresholds))
        spread = max(thresholds) / min(thresholds)
        rows.add(f"calibration_threshold_spread_{name}", spread, "x", f"thresholds {told}", GOAL_SPREAD)
    if held:
        told = f"{sum(held)} of {len(held)} profiles hold on the next seed's prompts"
        rows.add(f"calibration_confirmed_{name}", sum(held) / len(held), "of profiles", told, 1.0, "higher")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, calibrates, confirms, prints and writes."""
    parser = parser_of(__doc__)
    parser.add_argument("--name", required=True, help="of model and dtype, at the end of the rows' names")
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="where the profiles are kept")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="calibrations")
    parser.add_argument("--at-once", type=int, default=1, help="seeds that run side by side")
    parser.add_argument("--devices", default="", help="with commas between them: seeds take turns at them")
    parser.add_argument("given", nargs="*", metavar="OPTION", help="options of every calibration")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_dry = options.seeds < SEEDS or any(each in _OWN_RULE for each in options.given)
    rows = Results(arguments, device, dry=is_dry)
    options.folder.mkdir(parents=True, exist_ok=True)
    devices = [each for each in options.devices.split(",") if each]
    paths = made(options.folder, options.seeds, options.at_once, devices, options.given)
    profiles = [ReuseProfile.read(path) for path in paths]
    allowing = [path for path, profile in zip(paths, profiles, strict=True) if profile.terms is not None]
    held = [confirmed_of(path).is_file() for path in allowing]
    add_rows(rows, options.name, profiles, held)
    rows.write(options.json, f"calibration_{options.name}")


if __name__ == "__main__":
    main()
