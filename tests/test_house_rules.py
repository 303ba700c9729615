"""The rules of the house that no linter knows: floors, file size, docstrings, and what a user's copy may not name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("kernels", "semblend_trt", "engine_wrapper", "validation")  # lowest first
MAX_LINES = 600
PINS = ("constraints-cpu.txt", "requirements-ci.txt", "requirements-vllm.txt", "requirements-vllm-next.txt")
PRODUCT_TEXTS = ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", *PINS, ".ci/run", ".ci/lock.py")
URL_HOSTS = {
    "github.com",
    "arxiv.org",
    "huggingface.co",
    "www.gutenberg.org",
    "www.apache.org",
    "localhost",
    "127.0.0.1",
}

MODULES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TEXTS = MODULES + sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.md"))
TEXTS += [ROOT / name for name in PRODUCT_TEXTS] + sorted((ROOT / "docs").glob("*.md"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_floors(source: str, package: str) -> set[str]:
    """Floors that `source`, a module of the dotted `package`, imports anywhere: at the top, lazily or by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            names.add(".".join(filter(None, (parent if node.level else "", node.module))))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"import_module", "__import__"}:
                names.add(str(node.args[0].value))
    return {name.split(".")[0] for name in names} & set(FLOORS)


def test_the_import_check_sees_every_kind_of_import() -> None:
    lines = (
        "import validation.gates",
        "def late():\n    from engine_wrapper import connector",
        "importlib.import_module('semblend_trt.plan')",
    )
    assert [imported_floors(line, "kernels") for line in lines] == [
        {"validation"},
        {"engine_wrapper"},
        {"semblend_trt"},
    ]
    assert imported_floors("from ..rope import rotate_keys", "kernels.kv_move") == {"kernels"}
    assert imported_floors("import torch\nfrom numpy import array", "kernels") == set()


def is_a_command(source: str) -> bool:
    return 'if __name__ == "__main__":' in source


def printing_lines(source: str) -> list[int]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def found_in(texts: list[Path], pattern: str) -> dict[str, list[str]]:
    """What `pattern` matches, by file."""
    return {relative(path): hits for path in texts if (hits := re.findall(pattern, path.read_text(encoding="utf-8")))}


def test_imports_only_go_down() -> None:
    wrong = {}
    for path in MODULES:
        *folders, _ = path.relative_to(ROOT).parts
        above = set(FLOORS[FLOORS.index(folders[0]) + 1 :])
        if upward := imported_floors(path.read_text(encoding="utf-8"), ".".join(folders)) & above:
            wrong[relative(path)] = upward
    assert wrong == {}


def test_files_are_short() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_LINES} == {}


def test_every_module_has_a_docstring() -> None:
    assert [relative(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text("utf-8")))] == []


def test_library_code_does_not_print() -> None:
    sources = {relative(path): path.read_text(encoding="utf-8") for path in MODULES}
    prints = {name: printing_lines(source) for name, source in sources.items() if not is_a_command(source)}
    assert {name: lines for name, lines in prints.items() if lines} == {}


def test_nothing_is_left_for_later() -> None:
    assert found_in(TEXTS, r"\b(?:TODO|FIXME|XXX|HACK)\b") == {}


def test_no_place_of_a_development_machine_is_named() -> None:
    assert found_in(TEXTS, r"\.\./shared|(?<![\w.\-])/work/|(?<![\w.\-])/(?:opt|root|home)/\S+") == {}


def test_urls_point_to_known_hosts_only() -> None:
    hosts = found_in(TEXTS, r"\b\w+://([\w.\-]+)")
    assert {name: set(found) - URL_HOSTS for name, found in hosts.items() if set(found) - URL_HOSTS} == {}


def test_no_package_index_is_configured() -> None:
    assert found_in([ROOT / name for name in PRODUCT_TEXTS], r"(?:index-url|find-links)[ =]+\S+") == {}
