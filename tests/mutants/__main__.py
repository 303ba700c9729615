"""Run the seeded mutants: `python -m tests.mutants [--only NAME ...] [--jobs 2] [--venv .venv]`, from the repository.

Each is applied to a copy of the tree, where its test runs. The exit status is 1 if one survives, or if a test does not
run, or fails without it. `test_house_rules.py` finds those whose old text is gone."""

import argparse
import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.table import MUTANTS
from tests.pages import ROOT

VERDICTS = {0: "SURVIVED", 1: "killed", 124: "TIMED OUT"}
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
# No bytecode of a mutant is written.
GIVEN = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "."}
ENVIRONMENTS = {  # what their tests are given; PYTHONPATH is relative to the tree
    "": {},
    "vllm": {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "sglang": {"PYTHONPATH": "tests/engine_wrapper/sglang/standins:.", "SGLANG_USE_CPU_ENGINE": "1"},
}


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run the seeded mutants.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in MUTANTS])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--venv", default=".venv", help="the developers' environment; others have its name and -NAME")
    asked = parser.parse_args()
    pythons = {name: ROOT / f"{asked.venv}-{name}" / "bin" / "python" for name in ENVIRONMENTS}
    pythons[""] = Path(sys.executable)
    chosen = [each for each in MUTANTS if asked.only is None or each.name in asked.only]
    mutants = [each for each in chosen if pythons[each.environment].exists()]
    if mutants != chosen:
        print(f"skipped: {len(chosen) - len(mutants)} mutants need an environment that is not there")
    with tempfile.TemporaryDirectory() as room, ThreadPoolExecutor(asked.jobs) as pool:
        trees = SimpleQueue()
        for number in range(asked.jobs):
            tree = Path(room, str(number))
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
            compileall.compile_dir(tree, quiet=1)
            trees.put(tree)
        for name, python in pythons.items():
            if tests := sorted({each.test for each in mutants if each.environment == name}):
                status, log = tested(python, tree, name, tests)
                if status:
                    print(log, "\nThe tests of these mutants do not pass without them.")
                    return 1

        def is_killed(mutant):
            tree = trees.get()
            path = tree / mutant.file
            path.write_text(path.read_text("utf-8").replace(mutant.old, mutant.new), "utf-8")
            status, log = tested(pythons[mutant.environment], tree, mutant.environment, [mutant.test])
            shutil.copy2(ROOT / mutant.file, path)
            trees.put(tree)
            told = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", log, re.MULTILINE) or [log[-2000:]]
            print(VERDICTS.get(status, "BROKEN"), mutant.name, told[0], flush=True)
            return status == 1

        killed = sum(pool.map(is_killed, mutants))
    print(f"{killed} of {len(mutants)} mutants were killed")
    return int(killed < len(mutants))


def tested(python, tree, environment, tests):
    """The exit status of these tests in a tree, as `timeout` and pytest have it, and what was printed."""
    given = os.environ | GIVEN | ENVIRONMENTS[environment]
    given["PYTHONPATH"] = ":".join(str(tree / each) for each in given["PYTHONPATH"].split(":"))
    command = ["timeout", str(300 * len(tests)), python, *PYTEST, *(f"tests/{each}" for each in tests)]
    done = subprocess.run(command, cwd=tree, env=given, capture_output=True, text=True, errors="replace", check=False)
    return done.returncode, done.stdout + done.stderr


sys.exit(main())
