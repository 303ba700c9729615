"""Run the seeded mutants: `python -m tests.mutants [--only NAME ...] [--jobs 2] [--venv .venv]`, from the repository.

Each mutant is applied to a copy of the tree; its tests run there, in a fork of this process. Exit status 1 if a mutant
survives, if its old text has not one place, or if its tests do not run or fail without it."""

import argparse
import compileall
import gc
import importlib
import multiprocessing
import os
import re
import shutil
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
TIMEOUT_SECONDS = 300
VERDICTS = {0: "SURVIVED", 1: "killed", None: "TIMED OUT"}
VLLM = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
# By environment: variables of its tests, and folders in front of the tree.
ENVIRONMENTS = {"": ({}, ()), "vllm": (VLLM, ()), "sglang": ({"SGLANG_USE_CPU_ENGINE": "1"}, ("standins",))}
FORK = multiprocessing.get_context("fork")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run the seeded mutants.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in MUTANTS])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--venv", default=".venv", help="the developers' environment; others have its name and -NAME")
    parser.add_argument("--environment", help=argparse.SUPPRESS)
    asked, failed = parser.parse_args(), 0
    chosen = [each for each in MUTANTS if not asked.only or each.name in asked.only]
    if asked.environment is not None:
        return run_all([each for each in chosen if each.environment == asked.environment], asked.environment, asked.jobs)
    for name in sorted({each.environment for each in chosen}):
        python = Path(sys.executable) if not name else ROOT / f"{asked.venv}-{name}" / "bin" / "python"
        if python.exists():
            failed |= subprocess.run([python, "-m", "tests.mutants", *sys.argv[1:], "--environment", name]).returncode
        else:
            print(f"skipped: {sum(each.environment == name for each in chosen)} mutants need {python}")
    return failed


def run_all(mutants, environment, jobs):
    """Run mutants of one environment; return the exit status."""
    variables, folders = ENVIRONMENTS[environment]
    os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables)
    with tempfile.TemporaryDirectory() as room:
        trees = [copied_tree(Path(room, str(number)), folders) for number in range(jobs)]
        first = Run(trees[0], sorted({test for each in mutants for test in each.tests}))
        if first.status:
            print(f"{first.log}\nThe tests of these mutants do not pass without them.")
            return 1
        import_at_once((trees[0] / "modules").read_text().split())
        running, waiting, verdicts = {}, list(mutants), []
        while running or waiting:
            while waiting and trees:
                mutant, tree = waiting.pop(0), trees.pop()
                text = (tree / mutant.file).read_text("utf-8")
                if (count := text.count(mutant.old)) != 1:
                    verdicts.append("STALE")
                    print(f"STALE {mutant.name}: its old text occurs {count} times in {mutant.file}: {mutant.old!r}")
                    trees.append(tree)
                    continue
                (tree / mutant.file).write_text(text.replace(mutant.old, mutant.new), "utf-8")
                run = Run(tree, mutant.tests)
                running[run.sentinel] = mutant, run
            for sentinel in [*wait(list(running), 1), *(each for each, (_, run) in running.items() if run.is_overdue)][:1]:
                mutant, run = running.pop(sentinel)
                verdicts.append(VERDICTS.get(run.status, f"BROKEN (pytest ended with {run.status})"))
                found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.log, re.MULTILINE)
                print(verdicts[-1], mutant.name, f"{run.seconds:.0f} s", found[1] if found else run.log[-2000:], flush=True)
                shutil.copy2(ROOT / mutant.file, run.tree / mutant.file)
                trees.append(run.tree)
    print(f"{environment or 'developers'}: {verdicts.count('killed')} of {len(verdicts)} mutants were killed")
    return int(verdicts.count("killed") < len(verdicts))


def copied_tree(tree, folders):
    """Copy what git knows or would take, and compile it: no bytecode of a mutant is written."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(lambda each: (ROOT / each).is_file(), listed.splitlines()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    compileall.compile_dir(tree, quiet=1)
    places = [str(tree / "tests/engine_wrapper/sglang" / each) for each in folders]
    (tree / "places").write_text(os.pathsep.join([*places, str(tree)]))
    return tree


def import_at_once(names):
    """Import what the tests have imported of others, once for all forks."""
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py does around Triton's import
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]
    gc.collect()
    gc.freeze()


class Run:
    """One run of some tests in a copy of the tree, in a fork of this process."""

    def __init__(self, tree, tests):
        self.tree, self._begin = tree, time.monotonic()
        self._process = FORK.Process(target=run_tests, args=(tree, [f"tests/{each}" for each in tests]))
        self._process.start()
        self.sentinel = self._process.sentinel

    @property
    def seconds(self):
        return time.monotonic() - self._begin

    @property
    def is_overdue(self):
        return self.seconds > TIMEOUT_SECONDS

    @property
    def status(self):
        """Pytest's exit status once it has ended; None if it takes too long."""
        self._process.join(max(0, TIMEOUT_SECONDS - self.seconds))
        if self._process.is_alive():
            self._process.kill()
        return self._process.exitcode

    @property
    def log(self):
        return (self.tree / "log").read_text("utf-8", "replace")


def run_tests(tree, tests):
    """In a fork: run the tests of this tree, say which modules of others they needed, and exit as pytest does."""
    log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=(tree / "places").read_text(), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep) + [each for each in sys.path if each not in ("", str(ROOT))]
    for name in [each for each in sys.modules if each.partition(".")[0] in OURS]:
        del sys.modules[name]
    status = pytest.main(["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests])
    others = [each for each in sys.modules if each.partition(".")[0] not in (*OURS, "__main__", "conftest")]
    (tree / "modules").write_text("\n".join(others))
    os._exit(status)


sys.exit(main())
