"""Compiled code is kept for each file, and is there before the first request."""

import ast
import inspect

import numpy as np
import pytest
from llvmlite.binding import ffi

from semblend_trt.discovery import fingerprint, span_index
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.fleet import sketch_index
from semblend_trt.fleet.sketch import Sketch, fingerprints_of, sketch_of
from semblend_trt.fleet.sketch_index import SketchIndex

TOKENS, KEY = np.random.default_rng(0).integers(0, 1000, 90_000, dtype=np.int32), bytes(16)


def use_sketches():
    index = SketchIndex()
    index.remove(index.add(0, Sketch.from_bytes(sketch_of(TOKENS, KEY).to_bytes())))
    index.search(1, *fingerprints_of(TOKENS, [KEY]))


def use_spans():
    index = SpanIndex()
    index.add("space", "donor", TOKENS)
    assert index.find("space", TOKENS).runs
    index.remove("donor")
    index.settle()


@pytest.mark.parametrize(
    ("module", "use", "functions"),
    [(sketch_index, use_sketches, 9), (span_index, use_spans, 7), (fingerprint, use_spans, 5)],
)
def test_functions_take_nothing_from_another_file_and_are_compiled_once(module, use, functions):
    """Kept code is compiled again only when its own file changes."""
    compiled = [each for each in vars(module).values() if hasattr(each, "py_func")]
    imports = [each for each in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(each, ast.ImportFrom)]
    others = {name.name for each in imports if each.module.startswith("semblend_trt") for name in each.names}
    assert len(compiled) == functions
    assert others
    assert not others & {name for each in compiled for name in each.py_func.__code__.co_names}
    module.warm_up()
    before = [len(each.signatures) for each in compiled]
    use()
    assert [len(each.signatures) for each in compiled] == before
    assert vars(ffi.lib).get("kernel") is None  # vLLM reads the dictionary of each loaded object
