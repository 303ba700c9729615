"""Promises that tests are marked with, and the page that is made of them: `python -m tests.promises` writes it.

`@pytest.mark.promise("reuse", "Only equal tokens are reused")` stands on a test that holds it. Where several tests hold
one, the others' markers may have its first words alone, and end in three dots."""

from collections import Counter

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
`python -m tests.promises` makes this page from the tests that are marked with `@pytest.mark.promise`: the promises of
README and docs, by the file whose tests hold them, with other such files in brackets. `make imports` holds one more:
imports between the floors go downward only. [failure-modes.md](failure-modes.md#known-defects-of-public-connectors) has
the known defects of public connectors.
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
    """The page, a paragraph a test file: that which holds most of a section's promises first takes them, and so on.
    Unknown sections raise KeyError."""
    parts = {title: {} for title in SECTIONS.values()}
    for (section, text), files in promises().items():
        parts[SECTIONS[section]][text] = files
    return HEAD + "".join(f"\n## {title}\n" + "\n".join(_paragraphs(files)) + "\n" for title, files in parts.items())


def _paragraphs(files):
    """The paragraphs of one section, by file. Empties `files`, the files of each promise."""
    lines = []
    while files:
        held = Counter(each for names in files.values() for each in names)
        file = max(sorted(held), key=held.__getitem__)
        texts = [text for text, names in files.items() if file in names]
        others = {text: ", ".join(f"`{each}`" for each in sorted(files.pop(text) - {file})) for text in texts}
        lines.append(
            f"- `{file}`: "
            + " ".join(f"{text} (and {others[text]})." if others[text] else f"{text}." for text in texts)
        )
    return sorted(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
