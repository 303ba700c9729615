"""Commands of README and docs parse, and run with the packages of the extra that they name, and without all others."""

import json
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec
from unittest import mock

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine_wrapper.embedded import server
from semblend_trt.cli.main import main, subcommands
from tests.pages import README, ROOT
from tests.server_process import ended
from tests.test_docs import EVERY_PAGE
from tests.test_environment import PROJECT, needs_of
from validation import cli

pytestmark = pytest.mark.usefixtures("installed_subcommands")
installed = cache(packages_distributions)
# Runs a module with its arguments, where only the distributions of the first argument are installed.
ONLY = """
import importlib.machinery, json, runpy, sys
held, names = map(set, json.loads(sys.argv[1]))
class Installed(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in names else super().find_spec(name, path, target)
    @classmethod
    def find_distributions(cls, *context, **words):
        found = super().find_distributions(*context, **words)
        return (each for each in found if each.name.lower().replace("_", "-").replace(".", "-") in held)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Installed
sys.argv = sys.argv[2:]
if sys.argv[0] == "semblend-trt":
    from semblend_trt.cli.main import main
    sys.exit(main(sys.argv[1:]))
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def commands(page):
    """Module and words of each command in blocks of shell and in spans."""
    blocks = "\n".join(page.blocks("bash")).replace("\\\n", " ")
    for line in [*blocks.splitlines(), *page.spans]:
        if "..." in line or "|" in line or "<<" in line or "$(" in line:
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a text that goes on in the next line
            continue
        while words and ("=" in words[0] or words[0] in ("export", "nohup")):
            words.pop(0)
        if words[:2] in (["python", "-m"], ["python3", "-m"]) and len(words) > 2:
            yield words[2], words[3:]
        elif words[:1] == ["semblend-trt"] and len(words) > 1:
            yield "semblend-trt", words[1:]


@EVERY_PAGE
def test_modules_of_commands_exist(page):
    others = {"pip", "venv", "pytest", "sglang.launch_server", "dynamo.vllm", "dynamo.frontend", "build"}
    modules = {module for module, _ in commands(page)} - {"semblend-trt", *others}
    assert sorted(module for module in modules if find_spec(module) is None) == []


@EVERY_PAGE
def test_extras_exist(page):
    named = re.findall(r"(?:semblend-trt|['\" ]\.)\[([\w,-]+)\]", page.text)
    assert {extra for each in named for extra in each.split(",")} <= set(PROJECT["optional-dependencies"])


def parses(module, words):
    """Whether the module's own parser takes the words; others are not asked."""
    words = [word for word in words if word != "&"]
    try:
        if module == "validation":
            parse, _ = cli._COMMANDS.get(words[0] if words else "", (cli.parse_validation, None))
            parse(words if parse is cli.parse_validation else words[1:])
        elif module == "semblend-trt" and len(words) > 1 and words[0] in subcommands():
            main.__globals__["_parser"](words).parse_args(words)
    except SystemExit as exit_of_argparse:
        return not exit_of_argparse.code
    return True


@EVERY_PAGE
def test_options_of_commands_exist(page, capsys, tmp_path, monkeypatch):
    # `confirm` reads the profile that it is given.
    shutil.copy(ROOT / "validation/assets/model/reuse-profile.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    # Some spans name an option of a command and not what it needs beside it.
    refused = [(module, words) for module, words in commands(page) if not parses(module, words)]
    unknown = [line for line in capsys.readouterr().err.splitlines() if "unrecognized" in line or "invalid" in line]
    assert (unknown, refused if unknown else []) == ([], [])


def closure(extras):
    """The distributions that installing the package with these extras brings, by canonical name."""
    needs = [need for extra in [None, *extras] for need in needs_of(extra).values()]
    found = set()
    for need in needs:  # it grows meanwhile
        if (own := (canonicalize_name(need.name), *need.extras)) not in found:
            found.add(own)
            with suppress(PackageNotFoundError):
                for each in map(Requirement, requires(need.name) or ()):
                    if each.marker is None or any(each.marker.evaluate({"extra": name}) for name in ("", *need.extras)):
                        needs.append(each)
    return {name for name, *_ in found}


def run(module, *words, extras, folder, **variables):
    """The finished process of a module with these extras' packages alone, beside what Python and pip bring."""
    held = closure(extras) | {"pip", "setuptools", "wheel", "semblend-trt"}
    missing = [name for name, owners in installed().items() if not held & {*map(canonicalize_name, owners)}]
    return ended(
        sys.executable, "-c", ONLY, json.dumps([sorted(held), missing]), module, *words, cwd=folder, **variables
    )


@pytest.mark.last_step
@pytest.mark.parametrize(
    "words", ["config", "doctor", "estimate log.jsonl", "warm --help", "spot-check --help"], ids=str
)
def test_subcommands_need_no_extra(tmp_path, words):
    prompts = (f"Request {number}. {'A page that both requests share. ' * 30}" for number in range(2))
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    done = run("semblend-trt", *words.split(), extras=[], folder=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("added by donors" in done.stdout) == words.startswith("estimate")


@pytest.mark.last_step
@pytest.mark.promise("commands", "Links, files, settings, commands and the...")
def test_the_first_program_runs_from_the_extra_embedded_and_says_where_to_go_next(tmp_path):
    given = {"SEMBLEND_PROFILE": "what the program replaces"}
    done, said = run("semblend-trt", "try", extras=["embedded"], folder=tmp_path, **given), README.blocks("text")[0]
    assert (done.returncode, done.stdout[: len(said)]) == (0, said), done.stderr
    named = re.findall(r"^  semblend-trt (\w+)", done.stdout[len(said) :], re.MULTILINE)
    assert {"estimate", "try"} <= set(named) <= set(subcommands())


@pytest.mark.last_step
@pytest.mark.parametrize("words", [server.__name__, "validation calibrate"])
def test_the_embedded_server_and_the_validation_run_from_the_extras_of_their_names(tmp_path, words):
    """As far as the model, which is not there: what is loaded by then is what a run needs."""
    module, *words = words.split()
    extra = "validation" if words else "embedded"
    done = run(module, *words, "--model", str(tmp_path / "none"), extras=[extra], folder=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode, done.stdout
    assert str(tmp_path / "none") in done.stderr


@pytest.mark.promise(
    "commands",
    "`semblend-trt try` is the README's first program, also from the wheel without a checkout, and says what to "
    "install where it cannot run",
)
def test_its_source_is_the_readmes_first_program(capsys):
    assert main(["try", "--source"]) == 0
    assert capsys.readouterr().out == README.blocks("python")[0]


@pytest.mark.promise("commands", "`semblend-trt try` is the README's first...")
def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(transformers, "__version__", "4.57.3")
    with mock.patch.dict(os.environ):  # the program replaces settings
        assert main(["try"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("semblend-trt: Transformers 4.57.3 is installed; ")
    assert "pip install 'semblend-trt[embedded]'" in printed.err
    assert printed.err.count("\n") == 1
