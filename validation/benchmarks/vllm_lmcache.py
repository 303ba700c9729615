"""A yardstick beside our connector: LMCache with CacheBlend in vLLM, on a shifted document and on trap prompts.

`python -m validation.benchmarks.vllm_lmcache --out DIR` times prompts cold and blended, and with `--answers FOLDER`
compares a model's answers. Each part runs in a process of its own. DIR/lmcache.json holds what was measured and what
LMCache said; a part that did not start or was not served has its own words in the place of a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.markup import escape

from validation.benchmarks import goals
from validation.benchmarks.goals import label
from validation.benchmarks.lmcache_engine import CHECK_LAYER, RATIO, measure_answers, measure_ttft
from validation.benchmarks.ttft import Rows
from validation.files import write_json, write_text
from validation.machine import describe, versions
from validation.results import Measured, today, write_rows
from validation.scoreboard import markdown_table

if TYPE_CHECKING:
    from collections.abc import Sequence

TTFT = "ttft"
# Of what is said, LMCache's warnings and errors are kept, and the last lines of a part without a figure.
_TOLD, _LAST = 40, 20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_WARNINGS = re.compile(r"LMCache (WARNING|ERROR): (.*?) \(\w+\.py:\d+:[\w.]+\)$", re.DOTALL | re.MULTILINE)


def run_part(command: Sequence[str], path: Path, timeout: float) -> dict[str, Any]:
    """Runs a part's process, which writes what it measured to `path`, and adds what it `said`.

    Where it ended otherwise or not within `timeout` seconds, `problem` tells so, with its last words.
    """
    path.unlink(missing_ok=True)
    log, failed = path.with_suffix(".log"), None
    with log.open("w", encoding="utf-8") as stream:
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, timeout=timeout, check=False
            )
            failed = f"its process ended with {ended.returncode}" if ended.returncode else None
        except subprocess.TimeoutExpired:
            failed = f"its process was ended after {timeout:,.0f} s"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    text = _COLOURS.sub("", log.read_text(encoding="utf-8", errors="replace"))
    lines = [line for line in map(str.rstrip, text.splitlines()) if line]
    warnings = list(dict.fromkeys(_WARNINGS.findall(text)))
    found["said"] = [f"{level}: {message}" for level, message in warnings][:_TOLD]
    if failed and not found.get("problem"):
        found["problem"] = f"{failed}: {lines[-1]}" if lines else failed
    if found.get("problem"):
        found["last_lines"] = lines[-_LAST:]
        errors = [message for level, message in warnings if level == "ERROR"]
        if errors:  # the first; the others follow from it
            said = " ".join(line.strip() for line in errors[0].splitlines() if not line.startswith("  "))
            found["problem"] += f"; LMCache said: {said}"
    return found


def add_rows(parts: dict[str, dict[str, Any]], rows: Rows) -> None:
    """Adds the figures of the parts that were served."""
    for name, found in parts.items():
        if not found.get("problem"):
            _ttft_rows(found, rows) if name == TTFT else _answer_rows(name, found, rows)


def _ttft_rows(found: dict[str, Any], rows: Rows) -> None:
    size, cold, blended = label(found["tokens"]), _median(found["cold_ms"]), _median(found["blended_ms"])
    engine = _engine(found)
    rows.add(f"vllm_lmcache_cold_ttft_{size}_ms", cold, "ms", f"{engine}; nothing kept or taken")
    counts = f"{min(found['cached_tokens']):,} of {found['tokens']:,} tokens from LMCache in host memory"
    rows.add(f"vllm_lmcache_blended_ttft_{size}_ms", blended, "ms", f"cold {cold:,.1f} ms; {counts}; {engine}")
    rows.add(f"vllm_lmcache_blended_ttft_{size}_over_cold", blended / cold, "x", f"{blended:,.1f} over {cold:,.1f} ms")
    placed = _median(found["table_on_card_ms"])
    baseline = f"{placed:,.1f} over {cold:,.1f} ms; its table of angles put on the card, which LMCache does not do"
    rows.add(f"vllm_lmcache_blended_ttft_{size}_over_cold_table_on_card", placed / cold, "x", baseline)


def _answer_rows(name: str, found: dict[str, Any], rows: Rows) -> None:
    for family, told in found["families"].items():
        baseline = (
            f"cold {told['cold_em']:.3f}; {told['prompts']} prompts, {told['as_the_donor_says']:.3f} answered as the "
            f"donor says; {told['cached_tokens']:,} of {told['prompt_tokens']:,} tokens from LMCache, a "
            f"segment a line; {_engine(found)}"
        )
        row = f"vllm_lmcache_em_{family}_{name}"
        rows.add(row, told["blended_em"], "exact match", baseline, better="higher")


def _engine(found: dict[str, Any]) -> str:
    engine = found["engine"]
    return (
        f"LMCache {engine['lmcache']}, CacheBlend {RATIO:.0%} chosen at layer {CHECK_LAYER}, vLLM {engine['vllm']} "
        "eager, without its prefix cache"
    )


def _median(values: list[float]) -> float:
    return statistics.median(values)


def measure(options: argparse.Namespace) -> NoReturn:
    """The process of one part: writes what it measured, or what went wrong, and ends."""
    found: dict[str, Any] = {}
    try:
        if options.part == TTFT:
            found = measure_ttft(options.model, options.size, options.repeats)
        else:
            found = measure_answers(Path(options.part))
        found |= {"machine": describe("cuda"), "versions": versions()}
        found["versions"] |= {name: found["engine"][name] for name in ("vllm", "lmcache")}
    except Exception as error:
        traceback.print_exc()
        found["problem"] = f"{type(error).__name__}: {error}"
    write_json(options.found, found)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of LMCache may wait for ever


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, runs the parts, prints and writes. Exits with 1 when a part has no figure."""
    parser = argparse.ArgumentParser(prog="python -m validation.benchmarks.vllm_lmcache", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where lmcache.json, logs and rows go")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a config.json whose shape is timed (default: Qwen2.5-7B's)"
    )
    parser.add_argument("--size", type=int, default=goals.GOAL_SIZE, help="tokens of the prompts that are timed")
    parser.add_argument("--repeats", type=int, default=7, help="runs that count for a median; 0 times nothing")
    parser.add_argument(
        "--answers", type=Path, nargs="+", default=[], metavar="FOLDER", help="models whose answers are compared"
    )
    parser.add_argument("--timeout", type=float, default=420, help="seconds that a part may take")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.part is not None:
        measure(options)
    for folder in filter(None, (options.model, *options.answers)):
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} holds no config.json; name a model's folder")
    options.out.mkdir(parents=True, exist_ok=True)
    parts = ([TTFT] if options.repeats else []) + [str(folder) for folder in options.answers]
    if not parts:
        parser.error("nothing is asked for; give --repeats above 0 or --answers")
    if len({Path(part).name for part in parts}) < len(parts):
        parser.error("the folders of --answers need different names; their files would have one name")
    told = {}
    for part in parts:
        name = TTFT if part == TTFT else Path(part).name
        path = options.out / f"lmcache-{name}.json"
        own = [sys.executable, "-m", "validation.benchmarks.vllm_lmcache", *given, "--part", part, "--found", str(path)]
        told[name] = run_part(own, path, options.timeout)
        write_json(path, told[name])
    if not _record(" ".join(["python -m validation.benchmarks.vllm_lmcache", *given]), told, options.out):
        raise SystemExit(1)


def _record(command: str, parts: dict[str, dict[str, Any]], out: Path) -> bool:
    """Prints the table and writes it; returns whether every part has its figures."""
    there = next((found for found in parts.values() if "machine" in found), {})
    machine, known = there.get("machine") or describe("cpu"), there.get("versions") or versions()
    console = Console()
    rows = Rows(Measured(command, machine, known, today()), False, console)
    add_rows(parts, rows)
    table = rows.table()
    problems = {name: str(found["problem"]) for name, found in parts.items() if found.get("problem")}
    for name, problem in problems.items():
        table.add_row(f"vllm_lmcache_{name}", "none", "", "", "", escape(problem))
    console.print(table)
    write_json(out / "lmcache.json", {"command": command, "date": today(), "parts": parts})
    (out / "rows").mkdir(exist_ok=True)
    write_rows(out / "rows" / "vllm_lmcache.json", rows.rows)
    text = markdown_table("*", {f"{machine['name']}/vllm_lmcache": rows.rows}) if rows.rows else ""
    text += "".join(f"\nNo figure of {name}: {problem}\n" for name, problem in problems.items())
    write_text(out / "rows" / "vllm_lmcache.md", text)
    return not problems


if __name__ == "__main__":
    main()
