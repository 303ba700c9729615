"""docs/failure-modes.md names everything that can go wrong: all for which the code refuses, counts or drops."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from semblend_trt import audit
from semblend_trt.connector.eligibility import engine_refusal
from semblend_trt.donors.offload import OffloadEventKind
from semblend_trt.fleet.publisher import DROP_REASONS, RESYNC_REASONS
from semblend_trt.outcome import OTHER_REASON

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
SOURCES = sorted(
    path
    for floor in ("semblend_trt", "engine_wrapper")
    for path in (ROOT / floor).rglob("*.py")
    # The embedded engine's own reasons are why a sequence ends; the doctor repeats the connector's.
    if not {"benchmarks", "embedded", "doctor", "cli"} & set(path.parts)
)
A_REASON = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
TELLS_A_REASON = re.compile(r"reason|refusal|refused", re.IGNORECASE)
TAKES_A_REASON = re.compile(r"refus|ineligible|unsupported|donorfileerror|layouterror|without_spans", re.IGNORECASE)


def words(node: ast.expr | None) -> Iterator[str]:
    """Reasons that an expression may be: itself, a part of a tuple, a branch, a value of a table."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and A_REASON.fullmatch(node.value):
        yield node.value
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for part in node.elts:
            yield from words(part)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from words(value)
    elif isinstance(node, ast.IfExp):
        yield from words(node.body)
        yield from words(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from words(value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        for argument in node.args[1:]:
            yield from words(argument)


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def assigned(target: ast.expr, value: ast.expr | None) -> Iterator[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, given in zip(target.elts, value.elts, strict=True):
            yield from assigned(part, given)
    elif TELLS_A_REASON.search(name_of(target)):
        yield from words(value)


def returned(function: ast.FunctionDef) -> Iterator[str]:
    """What a function returns whose name or docstring speaks of a reason, an item of a loop among it."""
    if not TELLS_A_REASON.search(function.name + (ast.get_docstring(function) or "")):
        return
    for node in ast.walk(function):
        if isinstance(node, ast.Return):
            yield from words(node.value)
        if isinstance(node, ast.For):
            ends = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value]
            if name_of(node.target) and name_of(node.target) in map(name_of, ends):
                yield from words(node.iter)


def looped_over(loop: ast.For, module: ast.Module) -> Iterator[str]:
    """Values of a table of the module that a loop takes as reasons: `for name, reason in TABLE.items()`."""
    targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    if not any(TELLS_A_REASON.search(name_of(target)) for target in targets) or not isinstance(loop.iter, ast.Call):
        return
    table = name_of(loop.iter.func.value) if isinstance(loop.iter.func, ast.Attribute) else ""
    for node in module.body:
        if isinstance(node, ast.Assign) and table in map(name_of, node.targets):
            yield from words(node.value)


def reasons_in(source: str) -> set[str]:
    """Reasons in a module: assigned to, passed as or returned as one, or the name of a fault that is counted."""
    found: set[str] = set()
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found.update(assigned(target, node.value))
        elif isinstance(node, ast.For):
            found.update(looped_over(node, module))
        elif isinstance(node, ast.AnnAssign):
            found.update(assigned(node.target, node.value))
        elif isinstance(node, ast.FunctionDef):
            found.update(returned(node))
            if any(name_of(each.func) == "never_raises" for each in node.decorator_list if isinstance(each, ast.Call)):
                found.add(node.name)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg and TELLS_A_REASON.search(keyword.arg):
                    found.update(words(keyword.value))
            if TAKES_A_REASON.search(name_of(node.func)):
                for argument in node.args:
                    found.update(words(argument))
            elif name_of(node.func) == "ProfileMatch":
                found.update(words(node.args[1] if len(node.args) > 1 else None))
        elif isinstance(node, ast.Subscript) and name_of(node.value) == "faults":
            found.update(words(node.slice))
    return found


def named_in_the_page() -> set[str]:
    """The names in the last column of the page's tables, and of those of the page on vLLM."""
    lines = [*PAGE.splitlines(), *(ROOT / "docs" / "vllm.md").read_text(encoding="utf-8").splitlines()]
    rows = (line.split("|") for line in lines if line.startswith("| ") and not line.startswith("| event"))
    return {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row[-2])}


def test_the_search_finds_every_way_to_write_a_reason() -> None:
    source = '''
REFUSED_ROPE = {"ntk": "from_a_table"}
OFF = {"setting": "from_a_looped_table"}
class Match:
    refusal: str = "from_a_default"
def look(self, kind):
    """None, and the reason, where there is none."""
    tracked.plan, tracked.reason = None, "from_a_pair"
    runtime.refusal = runtime.refusal or "from_an_or"
    refusal = "from_a_branch" if kind else "from_another"
    runtime.faults["from_a_count"] += 1
    raise IneligibleRequest("from_an_error")
    return None, "from_a_return"
def the_refusal(llm_args):
    for setting, reason in OFF.items():
        return reason
    for name in ("from_a_loop",):
        return name
@never_raises(lambda: None)
def from_a_name(self): ...
look(reason="from_a_keyword", name="not_one")
_refused(7, "from_an_argument")
UnsupportedModelError(_REFUSED.get(kind, "from_a_fallback"), "a sentence is not one")
'''
    assert reasons_in(source) == {
        *("from_a_table", "from_a_default", "from_a_pair", "from_an_or", "from_a_branch", "from_another"),
        *("from_a_count", "from_an_error", "from_a_return", "from_a_name", "from_a_keyword", "from_an_argument"),
        *("from_a_fallback", "from_a_loop", "from_a_looped_table"),
    }


def test_every_reason_of_the_code_is_in_the_page() -> None:
    """What is listed here needs a row in docs/failure-modes.md that counts as it."""
    told = named_in_the_page()
    found = {path.relative_to(ROOT).as_posix(): reasons_in(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: sorted(reasons - told) for path, reasons in found.items() if reasons - told} == {}


def test_what_the_engine_is_refused_for_is_in_the_page() -> None:
    """Parallel sizes give their reason its name."""
    sizes = ("pipeline_parallel_size", "context_parallel_size")
    assert {engine_refusal(SimpleNamespace(**{size: 2})) for size in sizes} <= named_in_the_page()


def test_what_becomes_of_donors_and_events_is_in_the_page() -> None:
    failures = {
        event.value for event in OffloadEventKind if re.search("failed|skipped|refused|unavailable", event.value)
    }
    assert failures | {*DROP_REASONS, *RESYNC_REASONS, *audit.DROP_REASONS, OTHER_REASON} <= named_in_the_page()


def test_every_name_of_the_page_is_one_of_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    names = named_in_the_page() - {"pipeline_parallel", "context_parallel"}
    assert [name for name in sorted(names) if f'"{name}"' not in code and f"def {name}(" not in code] == []


def test_rows_are_whole() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert [line for line in rows if len(re.split(r"(?<!\\)\|", line)) != 6] == []
