"""Run the seeded mutants: `python -m tests.mutants [--only NAME ...] [--jobs 2] [--venv .venv]`, from the repository.

Each is applied to a copy of the tree; its test runs there, in a fork of this process. The exit status is 1 if one
survives, or if a test does not run, or fails without it. `test_table.py` finds those whose old text is gone."""

import argparse
import compileall
import gc
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
OURS = ("tests", "benchmarks", "validation", "engine_wrapper", "semblend_trt", "kernels")
Fork = multiprocessing.get_context("fork").Process
VERDICTS = {0: "SURVIVED", 1: "killed", -signal.SIGALRM: "TIMED OUT"}
QUIET = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
ENVIRONMENTS = {  # what their tests are given; PYTHONPATH is relative to the tree
    "": {},
    "vllm": {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"PYTHONPATH": "tests/engine_wrapper/sglang/standins:.", "SGLANG_USE_CPU_ENGINE": "1"},
}


def main():
    parser, failed = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run the seeded mutants."), 0
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in MUTANTS])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--venv", default=".venv", help="the developers' environment; others have its name and -NAME")
    parser.add_argument("--environment", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for name in [*ENVIRONMENTS] if asked.environment is None else [asked.environment]:
        chosen = [each for each in MUTANTS if each.environment == name and each.name in (asked.only or each.name)]
        python = ROOT / f"{asked.venv}-{name}" / "bin" / "python" if name else Path(sys.executable)
        if asked.environment is not None:
            return run_all(chosen, name, asked.jobs)
        if chosen and python.exists():
            command, given = [python, "-m", "tests.mutants", *sys.argv[1:], "--environment", name], ENVIRONMENTS[name]
            failed |= subprocess.run(command, cwd=ROOT, env=os.environ | given).returncode
        elif chosen:
            print(f"skipped: {len(chosen)} mutants need {python}")
    return failed


def run_all(mutants, environment, jobs):
    """Run the mutants of one environment; return the exit status."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "."} | ENVIRONMENTS[environment])
    waiting, running, killed = list(mutants), {}, 0
    with tempfile.TemporaryDirectory() as room:
        trees = [Path(room, str(number)) for number in range(jobs)]
        for tree in trees:
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
            compileall.compile_dir(tree, quiet=1)  # no bytecode of a mutant is written
        (first := Fork(target=run_tests, args=(trees[0], sorted({each.test for each in waiting})))).start()
        if first.join() or first.exitcode:
            print((trees[0] / "log").read_text("utf-8"), "\nThe tests of these mutants do not pass without them.")
            return 1
        os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py does around Triton's import
        for name in (trees[0] / "modules").read_text("utf-8").split():  # what is slow is imported once for all forks
            with suppress(Exception):
                importlib.import_module(name)
        del os.environ["TRITON_INTERPRET"]
        gc.freeze()
        while waiting or running:
            if waiting and trees:
                mutant, tree = waiting.pop(0), trees.pop()
                text = (tree / mutant.file).read_text("utf-8").replace(mutant.old, mutant.new)
                (tree / mutant.file).write_text(text, "utf-8")
                (process := Fork(target=run_tests, args=(tree, [mutant.test]))).start()
                running[process.sentinel] = mutant, tree, process, time.monotonic()
                continue
            mutant, tree, process, begin = running.pop(wait(list(running))[0])
            process.join()
            log, verdict = (tree / "log").read_text("utf-8", "replace"), VERDICTS.get(process.exitcode, "BROKEN")
            told = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", log, re.MULTILINE) or [log[-2000:]]
            print(f"{verdict} {mutant.name} {time.monotonic() - begin:.1f} s {told[0]}", flush=True)
            killed += verdict == "killed"
            shutil.copy2(ROOT / mutant.file, tree / mutant.file)
            trees.append(tree)
    print(f"{killed} of {len(mutants)} mutants were killed")
    return int(killed < len(mutants))


def run_tests(tree, tests):
    """In a fork: run the tests of this tree, note which modules of others they needed, and exit as pytest does."""
    os.dup2(os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(tree)
    signal.alarm(300 * len(tests))  # seconds
    places = [str(tree / each) for each in os.environ["PYTHONPATH"].split(":")]
    os.environ.update(PYTHONPATH=":".join(places), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:] = places + [each for each in sys.path if each not in ("", str(ROOT))]
    for name in [each for each in sys.modules if each.partition(".")[0] in OURS]:
        del sys.modules[name]
    status = pytest.main([*QUIET, *(f"tests/{each}" for each in tests)])
    (tree / "modules").write_text("\n".join(each for each in sys.modules if each.partition(".")[0] not in OURS))
    os._exit(status)


sys.exit(main())
