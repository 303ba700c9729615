"""The docs' tables of reasons, made from `semblend_trt/reasons.py`: `python -m tests.reasons` writes them."""

import re

from semblend_trt.reasons import TEXTS, Scope
from tests.pages import ROOT


def filled(page):
    """Return the page with the table of each scope that it names, from `<!-- reasons: engine -->` to `<!-- end -->`;
    `<!-- reasons: names -->` has a line for each scope, with its names."""

    def table(found):
        if found[1] == "names":
            rows = [f"| {each.value} | {', '.join(f'`{name}`' for name in texts)} |" for each, texts in TEXTS.items()]
            head = ["| scope | names |", "|---|---|"]
        else:
            rows = [f"| {text} | `{name}` |" for name, text in TEXTS[Scope(found[1])].items()]
            head = ["| what to do | counted as |", "|---|---|"]
        return "\n".join((f"<!-- reasons: {found[1]} -->", *head, *rows, "<!-- end -->"))

    return re.sub(r"<!-- reasons: (\w+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
