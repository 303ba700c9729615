"""Compiled code that is kept on disk must be made again when any source of it changes."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from llvmlite.binding import ffi

import semblend_trt
from semblend_trt.discovery.compiled import COMPILED_MODULES

PACKAGE = Path(semblend_trt.__file__).parent
FLOORS = [PACKAGE.parent / name for name in ("validation", "engine_wrapper", "semblend_trt", "kernels")]
DECORATORS = {"entry", "inner", "intrinsic"}

# An entry that takes in what another file says, called so that this file decides what comes out.
LOOKUP = """
import numpy as np
from semblend_trt.fleet.sketch import sampled

tokens, keys = np.arange(200, dtype=np.int32), np.zeros((1, 2), dtype=np.uint64)
_, (anchors,), _, _ = sampled(tokens, np.array([200]), keys, 9)
print(int(anchors > 9), *sampled.stats.cache_hits.values())
"""


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names_in(*nodes: ast.AST) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def compiled_functions(tree: ast.Module, decorators: set[str]) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [each for each in functions if names_in(*each.decorator_list) & decorators]


def taken_in(path: Path) -> set[Path]:
    """The product's files from which a file's compiled functions and its constants take names."""
    tree = parsed(path)
    constants = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    used = names_in(*compiled_functions(tree, DECORATORS), *constants)
    files = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) in used:
                    module = PACKAGE.parent.joinpath(*node.module.split("."))
                    places = (module / f"{alias.name}.py", module.with_suffix(".py"), module / "__init__.py")
                    files |= set([place for place in places if place.is_file()][:1])
    return files


def test_every_file_that_goes_into_kept_code_is_part_of_the_digest() -> None:
    modules = [path for floor in FLOORS for path in floor.rglob("*.py")]
    reached: set[Path] = set()
    waiting = [path for path in modules if compiled_functions(parsed(path), {"entry"})]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += taken_in(path)
    assert {path.relative_to(PACKAGE).as_posix() for path in reached} == set(COMPILED_MODULES)


def test_nothing_is_compiled_past_the_digest() -> None:
    modules = [path for floor in FLOORS for path in floor.rglob("*.py")]
    assert [path.name for path in modules if "njit" in path.read_text(encoding="utf-8")] == ["compiled.py"]


def test_a_changed_constant_reaches_the_compiled_code_that_takes_it_in(tmp_path: Path) -> None:
    copy = tmp_path / "semblend_trt"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # Python tells a changed module by the second and the size, which both stay here.
    told = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")} | told

    def look_up() -> list[int]:
        run = subprocess.run(
            [sys.executable, "-c", LOOKUP], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return [int(word) for word in run.stdout.split()]

    def change(name: str, before: str, after: str) -> None:
        source = (copy / name).read_text(encoding="utf-8")
        assert source.count(before) == 1
        (copy / name).write_text(source.replace(before, after), encoding="utf-8")

    assert look_up() == [1]
    assert look_up() == [1, 1]
    change("discovery/winnowing.py", "WINDOW_GRAMS = 17", "WINDOW_GRAMS = 170")
    assert look_up() == [0]


def test_who_looks_at_all_that_is_loaded_finds_a_dictionary() -> None:
    assert vars(ffi.lib).get("kernel") is None
