"""Promises that tests are marked with, and the page that is made of them: `python -m tests.promises` writes it.

`@pytest.mark.promise("reuse", "Only equal tokens are reused")` stands on a test that holds it. Where several tests hold
one, the others' markers may have its first words alone, and end in three dots."""

from tests.pages import ROOT, marks

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
README and these pages make, with the files of its tests. `make imports` holds one more: imports between the floors go
downward only. What each known defect of public connectors is, and which tests fail on it, is in
[failure-modes.md](failure-modes.md#known-defects-of-public-connectors).
"""


def promises():
    """The files whose tests hold a promise, by section and text. Raises ValueError for words that begin none or two."""
    found = {}
    for name, section, text in sorted(marks("promise"), key=lambda each: each[2].endswith("...")):
        if text.endswith("..."):
            whole = [each for each in found if each[0] == section and each[1].startswith(text[:-3])]
            if len(whole) != 1:
                raise ValueError(f"{name}: {text!r} begins {len(whole)} promises.")
            [(section, text)] = whole
        found.setdefault((section, text), set()).add(name.partition("::")[0])
    return found


def page():
    """The page, a line a promise; unknown sections raise KeyError."""
    lines = {title: [] for title in SECTIONS.values()}
    for (section, text), files in promises().items():
        lines[SECTIONS[section]].append(f"- {text} ({', '.join(f'`{file}`' for file in sorted(files))})")
    return HEAD + "".join(f"\n## {title}\n\n" + "\n".join(each) + "\n" for title, each in lines.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
