"""`semblend-trt try` is the README's first program: its source, what it prints, and where it leads."""

import os
import re

import pytest
import transformers

from semblend_trt.cli.main import main, subcommands
from tests.pages import README

pytestmark = pytest.mark.usefixtures("installed_subcommands")


@pytest.mark.promise(
    "commands",
    "`semblend-trt try` is the README's first program, also from the wheel without a checkout, and says what to "
    "install where it cannot run",
)
def test_its_source_is_the_readmes_first_program(capsys):
    assert main(["try", "--source"]) == 0
    assert capsys.readouterr().out == README.blocks("python")[0]


def test_it_prints_what_the_readme_says_and_where_to_go_next(monkeypatch, capsys):
    for name in [name for name in os.environ if "SEMBLEND_" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SEMBLEND_PROFILE", "what the program replaces, and leaves nowhere")
    assert main(["try"]) == 0
    printed = capsys.readouterr().out
    said = README.blocks("text")[0]
    assert printed[: len(said)] == said
    named = re.findall(r"^  semblend-trt (\w+)", printed[len(said) :], re.MULTILINE)
    assert {"estimate", "try"} <= set(named) <= set(subcommands())


@pytest.mark.promise("commands", "`semblend-trt try` is the README's first...")
def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(transformers, "__version__", "4.57.3")
    assert main(["try"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("semblend-trt: Transformers 4.57.3 is installed; ")
    assert "pip install 'semblend-trt[embedded]'" in printed.err
    assert printed.err.count("\n") == 1
