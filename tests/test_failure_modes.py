"""docs/failure-modes.md names everything that can go wrong: all for which the code refuses, counts or drops."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import TYPE_CHECKING

from semblend_trt import audit
from semblend_trt.connector.eligibility import engine_refusal
from semblend_trt.donors.offload import OffloadEventKind
from semblend_trt.fleet.publisher import DROP_REASONS, RESYNC_REASONS
from semblend_trt.outcome import OTHER_REASON
from tests.pages import ROOT, Page, code_in

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = [Page("docs/failure-modes.md"), Page("docs/vllm.md")]
# The names in the last columns of their tables.
TOLD = {name for page in PAGES for row in page.rows for name in code_in(row[-1]) if name.isidentifier()}
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for floor in ("semblend_trt", "engine_wrapper")
    for path in (ROOT / floor).rglob("*.py")
    # The embedded engine's own reasons are why a sequence ends; the doctor repeats the connector's.
    if not {"benchmarks", "embedded", "doctor", "cli"} & set(path.parts)
}
# Parts of the names of what holds a reason, and of calls that take one.
TELLING = ("reason", "refusal", "refused")
TAKING = ("refus", "ineligible", "unsupported", "donorfileerror", "layouterror", "without_spans", "profilematch")


def words(node: ast.AST | None) -> Iterator[str]:
    """Reasons that an expression may be: itself, a part of a tuple, a branch, a value of a table."""
    parts: list[ast.expr] = []
    match node:
        case ast.Constant(value=str(word)) if word.isidentifier() and word.islower():
            yield word
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            pass
        case ast.Dict(values=parts) | ast.BoolOp(values=parts):
            pass
        case ast.IfExp(body=body, orelse=other):
            parts = [body, other]
        case ast.Call(func=ast.Attribute(attr="get"), args=[_, *parts]):
            pass
    for part in parts:
        yield from words(part)


def name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", getattr(node, "arg", ""))))


def tells(text: str, parts: tuple[str, ...] = TELLING) -> bool:
    return any(part in text.lower() for part in parts)


def targets(node: ast.AST) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def expressions(module: ast.Module) -> Iterator[ast.AST | None]:
    """Where a module tells a reason: what is assigned to, passed as, looped over or returned as one."""
    tables = {
        name_of(target): node.value for node in module.body if isinstance(node, ast.Assign) for target in node.targets
    }
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                yield from (value for name, value in zip(names, values, strict=True) if tells(name_of(name)))
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                if tells(name_of(target)):
                    yield value
            case ast.keyword(arg=str(name), value=value) if tells(name):
                yield value
            case ast.For(target=target, iter=ast.Call(func=ast.Attribute(value=table))):
                if any(tells(name_of(each)) for each in targets(target)):
                    yield tables.get(name_of(table))
            case ast.FunctionDef() if tells(node.name + (ast.get_docstring(node) or "")):
                yield from returned(node)
            case ast.Call(func=function, args=arguments) if tells(name_of(function), TAKING):
                yield from arguments
            case ast.Subscript(value=ast.Name(id="faults") | ast.Attribute(attr="faults"), slice=value):
                yield value


def returned(function: ast.FunctionDef) -> Iterator[ast.AST | None]:
    """What a function returns, the items of a loop among it."""
    ends = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    yield from ends
    names = {name_of(end) for end in ends if isinstance(end, ast.Name)}
    yield from (node.iter for node in ast.walk(function) if isinstance(node, ast.For) and name_of(node.target) in names)


def reasons_in(source: str) -> set[str]:
    """Reasons in a module, and the names of faults that it counts: of functions that never raise."""
    module = ast.parse(source)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    decorators = [(node.name, getattr(each, "func", each)) for node in functions for each in node.decorator_list]
    faults = {name for name, each in decorators if name_of(each) == "never_raises"}
    return faults | {word for each in expressions(module) for word in words(each)}


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
    found = {path: reasons_in(source) - TOLD for path, source in SOURCES.items()}
    assert {path: sorted(reasons) for path, reasons in found.items() if reasons} == {}


def test_what_is_named_while_it_runs_is_in_the_page() -> None:
    """Parallel sizes give their reason its name; events and dropped lines have lists of their own."""
    sizes = ("pipeline_parallel_size", "context_parallel_size")
    refusals = {engine_refusal(SimpleNamespace(**{size: 2})) for size in sizes}
    failures = ("failed", "skipped", "refused", "unavailable")
    events = {event.value for event in OffloadEventKind if tells(event.value, failures)}
    assert refusals | events | {*DROP_REASONS, *RESYNC_REASONS, *audit.DROP_REASONS, OTHER_REASON} <= TOLD


def test_every_name_of_the_page_is_one_of_the_code() -> None:
    code = "\n".join(SOURCES.values())
    names = TOLD - {"pipeline_parallel", "context_parallel"}
    assert [name for name in sorted(names) if f'"{name}"' not in code and f"def {name}(" not in code] == []


def test_rows_are_whole() -> None:
    rows = [line for line in PAGES[0].text.splitlines() if line.startswith("|")]
    assert [line for line in rows if line.replace("\\|", "").count("|") != 5] == []
