"""Answers of trained models inside vLLM, under policy verified against cold, as result rows.

`python -m benchmarks.vllm.answers --model DIR --out DIR` calibrates each model in vLLM, in float32, and
serves prompts there that it was not calibrated with; each of the two in a process of its own. With `--kv-dtype fp8`
the KV cache, cold as well, is in e4m3. A profile that lies in --out as <model>.profile.json already is used as it is.
What follows `--` goes to every calibration, as `--sample-tries 0`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.program import parser_of
from validation import models
from validation.arms import VERIFIED
from validation.results import Row, command, write_rows
from validation.scoreboard import markdown_table, rows_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

FAMILIES = ("header_trap", "unit_trap", "near_duplicates", "reordered")
# The rows of a quality run that are kept, by what they are called here.
NAMES = {
    models.AUTO: {"verified_em_vs_cold": "vllm_em_vs_cold", "position_fix_em": "vllm_position_fix_em"},
    models.FP8: {"verified_em_vs_cold": "verified_em_vs_cold_fp8", "position_fix_em": "position_fix_em_fp8"},
}
# Far from the seeds that a calibration uses.
_FRESH = 5_000


def rows_for(model: Path, options: argparse.Namespace) -> list[Row]:
    """Calibrate and serve one model. Raises CalledProcessError if either fails, SystemExit if nothing was reusable."""
    profile = options.out / f"{model.name}.profile.json"
    shared = ["--engine", "vllm", "--model", str(model), "--dtype", "float32", "--families", options.families]
    shared += ["--kv-dtype", options.kv_dtype]
    shared += ["--groups", str(options.groups), "--questions", str(options.questions), "--tokens", str(options.tokens)]
    if not profile.is_file():
        _run(["calibrate", *shared, *options.given, "--output", str(profile)])
    with tempfile.TemporaryDirectory() as folder:
        document, record = options.out / f"{model.name}.json", Path(folder) / "rows"
        given = [*shared, "--seed", str(_FRESH), "--profile", str(profile), "--output", str(document)]
        # Where a family is not shown to be as good as cold, its rows say by how much.
        _run(["quality", *given, "--record", str(record)])
        if idle := not_offered(json.loads(document.read_text(encoding="utf-8"))):
            raise SystemExit(f"{model.name}: no token was offered in {', '.join(idle)}; does {profile} hold here?")
        [path] = record.rglob("*.json")
        found = rows_of(path)
    return renamed(found, model.name, options)


def _run(arguments: Sequence[str]) -> None:
    """Run a command of `python -m validation`. Raises CalledProcessError unless its exit status is 0 or 1.
    Status 1 says that the command did not show something to hold."""
    call = [sys.executable, "-m", "validation", *arguments]
    if (status := subprocess.run(call, check=False).returncode) not in (0, 1):
        raise subprocess.CalledProcessError(status, call)


def not_offered(report: dict[str, Any]) -> list[str]:
    """Return the families in which the plans of policy verified offered nothing."""
    return [line["family"] for line in report["lines"] if line["arm"] == VERIFIED and not line["offered"]]


def renamed(rows: Sequence[Row], model: str, options: argparse.Namespace) -> list[Row]:
    """Return the kept rows under their names here, at the end of which is the model."""
    names = NAMES[options.kv_dtype]
    kept = [(row, theirs) for row in rows for theirs in names if row.name.startswith(theirs)]
    return [
        replace(row, name=f"{row.name.replace(theirs, names[theirs], 1)}_{model}", command=options.command)
        for row, theirs in kept
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, serve every model, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, action="append", required=True, metavar="DIR", help="may be repeated")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="profiles, answers and vllm_answers.json"
    )
    parser.add_argument("--families", default=",".join(FAMILIES), help="with commas between them")
    parser.add_argument("--groups", type=int, default=25, help="groups of questions on the same documents")
    parser.add_argument("--questions", type=int, default=4, help="questions in each group")
    parser.add_argument("--tokens", type=int, default=1_024, help="longest prompt, in tokens")
    parser.add_argument("--kv-dtype", choices=models.KV_DTYPES, default=models.AUTO, help="vLLM's KV cache")
    parser.add_argument("given", nargs="*", metavar="OPTION", help="options of every calibration")
    options = parser.parse_args(arguments)
    options.command = command(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    name = "vllm_answers" if options.kv_dtype == models.AUTO else f"vllm_answers_{options.kv_dtype}"
    rows: list[Row] = []
    for model in options.model:
        rows += rows_for(model, options)
        # After every model: a run that is cut short has written what it found.
        for folder in filter(None, (options.out / "rows", options.json)):
            write_rows(folder / f"{name}.json", rows)
    print(markdown_table("*", {f"{rows[0].machine['name']}/{name}": rows}) if rows else "no row")


if __name__ == "__main__":
    main()
