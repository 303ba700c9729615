"""Rules that no linter knows: file size, tests of promises, seeded mutants, and what a user's copy may not name."""

import re

from tests import promises
from tests.mutants.table import MUTANTS
from tests.pages import ROOT, Page, named_tests

FLOORS = ("kernels", "semblend_trt", "engine_wrapper", "validation", "benchmarks")
MAX_LINES = 600
PINS = ("constraints-cpu.txt", *sorted(path.name for path in ROOT.glob("requirements-*.txt")))
PRODUCT_TEXTS = ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", *PINS, ".ci/run", ".ci/lock.py")
URL_HOSTS = {"github.com", "arxiv.org", "huggingface.co", "www.gutenberg.org", "www.apache.org"}
URL_HOSTS |= {"localhost", "127.0.0.1"}

MODULES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TEXTS = MODULES + sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.md"))
TEXTS += [ROOT / name for name in PRODUCT_TEXTS] + sorted((ROOT / "docs").glob("*.md"))
# What runs have written, with the commands that made it.
RECORDS = sorted((ROOT / "benchmarks").rglob("*.json")) + sorted((ROOT / "docs").rglob("*.json"))


def found_in(texts, pattern):
    """What `pattern` matches, by file."""
    found = ((path, re.findall(pattern, path.read_text(encoding="utf-8"))) for path in texts)
    return {path.relative_to(ROOT).as_posix(): hits for path, hits in found if hits}


def test_files_are_short():
    lines = {name: len(ends) for name, ends in found_in(MODULES, "\n").items()}
    assert {name: count for name, count in lines.items() if count >= MAX_LINES} == {}


def test_the_page_of_promises_is_made_of_the_tests_markers():
    """`python -m tests.promises` makes it."""
    assert Page("docs/promises.md").text == promises.page()


def test_running_engines_are_read_in_hooks_and_constructors_alone():
    """Elsewhere an attribute that a version may lack has a name and a type."""
    engines = [each for name in ("vllm", "trtllm") for each in (ROOT / "engine_wrapper" / name).glob("*.py")]
    others = [each for each in engines if each.name not in ("hooks.py", "engine_spec.py")]
    assert found_in(others, r"\bhasattr\(|getattr\([^()]*(?:\([^()]*\)[^()]*)*,[^()]*,[^()]*\)") == {}
    assert found_in(engines, r"\bhasattr\(")


def test_nothing_is_left_for_later():
    assert found_in(TEXTS, r"\b(?:TODO|FIXME|XXX|HACK)\b") == {}


def test_no_place_of_a_development_machine_is_named():
    assert found_in(TEXTS + RECORDS, r"\.\./shared|(?<![\w.\-])/work/|(?<![\w.\-])/(?:opt|root|home)/\S+") == {}


def test_urls_point_to_known_hosts_only():
    hosts = found_in(TEXTS, r"\b\w+://([\w.\-]+)")
    assert {name: set(found) - URL_HOSTS for name, found in hosts.items() if set(found) - URL_HOSTS} == {}


def test_no_package_index_is_configured():
    assert found_in([ROOT / name for name in PRODUCT_TEXTS], r"(?:index-url|find-links)[ =]+\S+") == {}


def test_each_mutant_has_one_place():
    found = {each.name: (ROOT / each.file).read_text("utf-8").count(each.old) for each in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_each_mutant_has_its_test():
    assert sorted({each.test for each in MUTANTS} - named_tests().keys()) == []


def test_mutants_have_names_of_their_own_and_change_something():
    assert len({each.name for each in MUTANTS}) == len(MUTANTS)
    assert [each.name for each in MUTANTS if each.old == each.new] == []
