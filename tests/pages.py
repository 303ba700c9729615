"""Pages of the documentation as tests compare them with the code: links, code, and tables."""

import ast
from functools import cache, cached_property
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
_MARKDOWN = MarkdownIt("commonmark").enable("table")


class Page:
    """One file of the repository, by its path from the root."""

    def __init__(self, name):
        self.name = name
        self.text = (ROOT / name).read_text(encoding="utf-8")

    @cached_property
    def _tokens(self):
        return _MARKDOWN.parse(self.text)

    @property
    def _inline(self):
        return [child for token in self._tokens for child in token.children or ()]

    @property
    def links(self):
        return [str(token.attrs["href"]) for token in self._inline if token.type == "link_open"]

    @property
    def spans(self):
        """What stands between backquotes within the text."""
        return [token.content for token in self._inline if token.type == "code_inline"]

    def blocks(self, language=None):
        """Blocks of code in `language`, or all of them."""
        return [token.content for token in self._tokens if token.type == "fence" and language in (None, token.info)]

    @property
    def code(self):
        """All code of the page, each block and each span in lines of its own."""
        return "\n".join([*self.spans, *self.blocks()])

    @property
    def paragraphs(self):
        return [token.content for token in self._tokens if token.type == "inline"]

    @property
    def rows(self):
        """The cells of all tables, row by row, the headers' among them."""
        rows = []
        for before, token in zip(self._tokens, self._tokens[1:], strict=False):
            if before.type == "tr_open":
                rows.append([])
            if before.type in ("td_open", "th_open"):
                rows[-1].append(token.content)
        return rows


def code_in(text):
    """What stands between backquotes in a text."""
    return text.split("`")[1::2]


@cache
def named_tests():
    """Every test, by its file from the folder of tests and its name: `test_docs.py::test_settings_exist`."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                found[f"{path.relative_to(ROOT / 'tests').as_posix()}::{node.name}"] = node
    return found


def marks(name):
    """The arguments of every `pytest.mark.NAME` of a test, after the test's name."""
    for test, node in sorted(named_tests().items()):
        for mark in reversed(node.decorator_list):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{name}":
                yield test, *map(ast.literal_eval, mark.args)


PAGES = [Page(f"docs/{path.name}") for path in sorted((ROOT / "docs").glob("*.md"))]
README = Page("README.md")
