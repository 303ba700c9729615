"""Promises that tests are marked with, and the page that is made of them: `python -m tests.promises` writes it.

`@pytest.mark.promise("reuse", "Only equal tokens are reused")` stands on a test that holds it. Where several tests hold
one, the others' markers may have its first words alone, and end in three dots."""

import ast
from collections import Counter

from tests.pages import ROOT, named_tests

PAGE = ROOT / "docs" / "promises.md"
SECTIONS = {
    "reuse": "What is reused",
    "policies": "Policies and the reuse profile",
    "donors": "Finding and keeping donors",
    "engines": "Engines",
    "commands": "Settings, commands and what is reported",
    "fleet": "The fleet",
}
HEAD = """# Promises

Made by `python -m tests.promises` from the tests that are marked with `@pytest.mark.promise`: every promise that the
README and these pages make, by the file of its tests. Other files that hold it too follow in brackets. `make imports`
holds one more: imports between the floors go downward only.
"""


def marked():
    """Section and text of every marker, with the test's name from the folder of tests."""
    for name, test in sorted(named_tests().items()):
        for mark in reversed(test.decorator_list):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                section, text = map(ast.literal_eval, mark.args)
                yield section, text, name


def promises():
    """The files whose tests hold a promise, by section and text. Raises ValueError for words that begin none or two."""
    found = {}
    for section, text, name in sorted(marked(), key=lambda each: each[1].endswith("...")):
        if text.endswith("..."):
            whole = [each for each in found if each[0] == section and each[1].startswith(text[:-3])]
            if len(whole) != 1:
                raise ValueError(f"{name}: {text!r} begins {len(whole)} promises.")
            [(section, text)] = whole
        found.setdefault((section, text), set()).add(name.partition("::")[0])
    return found


def page():
    """The page, a row for each file of tests; unknown sections raise KeyError."""
    held = {title: {} for title in SECTIONS.values()}
    for (section, text), files in promises().items():
        held[SECTIONS[section]][text] = files
    return HEAD + "".join(f"\n## {title}\n" + "".join(rows(each)) for title, each in held.items())


def rows(held):
    """The table of one section: the file that holds most of the promises that are left comes next."""
    yield "| tests | promises |\n|---|---|\n"
    while held:
        counts = Counter(file for files in held.values() for file in sorted(files))
        first, _ = max(sorted(counts.items()), key=lambda each: each[1])
        here = [text for text, files in held.items() if first in files]
        yield f"| `{first}` | {'<br>'.join(text + also(held[text] - {first}) for text in here)} |\n"
        held = {text: files for text, files in held.items() if text not in here}


def also(files):
    return f" ({', '.join(f'`{file}`' for file in sorted(files))})" if files else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
