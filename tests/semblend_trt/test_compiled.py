"""Compiled code that is kept on disk is made again only when its own file changes, so it takes nothing from others."""

import ast
from pathlib import Path

from llvmlite.binding import ffi

import semblend_trt

PACKAGE = Path(semblend_trt.__file__).parent
FLOORS = [PACKAGE.parent / name for name in ("validation", "engine_wrapper", "semblend_trt", "kernels")]


def files_with(text):
    return [path for floor in FLOORS for path in floor.rglob("*.py") if text in path.read_text(encoding="utf-8")]


def names_in(*nodes):
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def test_compiled_functions_and_their_constants_take_nothing_from_another_file():
    for path in files_with("semblend_trt.compiled"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        compiled = [each for each in functions if names_in(*each.decorator_list) & {"entry", "inner"}]
        statements = [statement for function in compiled for statement in function.body]
        constants = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        used = names_in(*statements) | names_in(*(constants if compiled else []))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        taken = {alias.name for node in imports if str(node.module).startswith("semblend_trt") for alias in node.names}
        assert not used & taken, path


def test_nothing_is_compiled_in_another_way():
    assert [path.name for path in files_with("njit")] == ["compiled.py"]


def test_who_looks_at_all_that_is_loaded_finds_a_dictionary():
    assert vars(ffi.lib).get("kernel") is None
