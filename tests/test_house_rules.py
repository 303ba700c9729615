"""The rules of the house that no linter knows: floors, file size, docstrings, and what a user's copy may not name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("kernels", "semblend_trt", "engine_wrapper", "validation")  # lowest first
MAX_LINES = 350
PRODUCT_TEXTS = ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "constraints-cpu.txt", ".ci/run")
URL_HOSTS = {"github.com", "arxiv.org", "huggingface.co", "www.gutenberg.org", "www.apache.org"}

MODULES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TEXTS = MODULES + sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.md"))
TEXTS += [ROOT / name for name in PRODUCT_TEXTS]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_module = pytest.mark.parametrize("path", MODULES, ids=relative)
every_text = pytest.mark.parametrize("path", TEXTS, ids=relative)


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


@every_module
def test_imports_only_go_down(path: Path) -> None:
    floor = path.relative_to(ROOT).parts[0]
    package = ".".join(path.relative_to(ROOT).parent.parts)
    above = set(FLOORS[FLOORS.index(floor) + 1 :])
    assert not imported_floors(path.read_text(), package) & above


@every_module
def test_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_LINES


@every_module
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@every_module
def test_library_code_does_not_print(path: Path) -> None:
    source = path.read_text()
    if 'if __name__ == "__main__":' in source:  # a command
        return
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


@every_text
def test_nothing_is_left_for_later(path: Path) -> None:
    assert not re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", path.read_text())


@every_text
def test_no_place_of_a_development_machine_is_named(path: Path) -> None:
    assert not re.findall(r"\.\./shared|(?<![\w.\-])/work/|(?<![\w.\-])/(?:opt|root|home)/\S+", path.read_text())


@every_text
def test_urls_point_to_known_hosts_only(path: Path) -> None:
    hosts = set(re.findall(r"\b\w+://([\w.\-]+)", path.read_text()))
    assert hosts <= URL_HOSTS | {"localhost", "127.0.0.1"}


def test_no_package_index_is_configured() -> None:
    for name in PRODUCT_TEXTS:
        assert not re.findall(r"(?:index-url|find-links)[ =]+\S", (ROOT / name).read_text())
