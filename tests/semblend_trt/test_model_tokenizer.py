"""A model's tokenizer by its own rules, or a refusal; names of Transformers for any thread; its oldest version."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tomllib
import transformers
from tokenizers import Tokenizer

from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import (
    MIN_TRANSFORMERS,
    embedded_engine_refusal,
    imported,
    load_tokenizer,
    tokenizer_file,
)
from tests.pages import ROOT

TEXT = "It's 12 345 o'clock,  and naïve."


def test_the_files_own_rules_hold(tiny_qwen2_path):
    """Transformers would split text as Qwen2's tokenizer does, against the file."""
    written = Tokenizer.from_file(str(tiny_qwen2_path / "tokenizer.json"))
    assert load_tokenizer(str(tiny_qwen2_path)).encode(TEXT) == written.encode(TEXT).ids
    by_type, by_file = (
        json.loads(each.to_str())["pre_tokenizer"]
        for each in (transformers.AutoTokenizer.from_pretrained(tiny_qwen2_path).backend_tokenizer, written)
    )
    used = load_tokenizer(str(tiny_qwen2_path)).backend_tokenizer
    assert by_type != by_file
    assert json.loads(used.to_str())["pre_tokenizer"] == by_file


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=f"tokenizer {tmp_path} cannot be read"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        tokenizer_file(tmp_path)


def wait_for_the_other_thread():
    """Return once another thread asks for the module that this one imports, and has had its turns to go on."""
    turns = 0
    while turns < 100:
        for thread, frame in sys._current_frames().items():
            while frame is not None and thread != threading.get_ident():
                turns += frame.f_code.co_name == "imported"
                frame = frame.f_back
        os.sched_yield()


def test_a_module_that_replaces_itself_is_whole_for_every_thread(tmp_path, monkeypatch):
    """As Transformers does at the end of its import, while both halves of a connector are built at once."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "replaces_itself.py").write_text(
        "import sys, types\n"
        f"from {__name__} import wait_for_the_other_thread\n"
        "wait_for_the_other_thread()\n"
        "sys.modules[__name__] = types.SimpleNamespace(name='whole')\n"
    )
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(imported, ["name"] * 2, ["replaces_itself"] * 2)) == ["whole"] * 2


@pytest.mark.parametrize("extra", ["embedded", "validation"])
def test_the_extras_install_what_runs(extra):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"transformers>={MIN_TRANSFORMERS}" in extras[extra]


@pytest.mark.promise("engines", "The connector works with Transformers 4...")
@pytest.mark.parametrize(("version", "runs"), [("4.99.0.dev0", False), ("5.0.0rc1", False), ("5.0.0", True)])
def test_older_ones_are_refused_and_the_extra_is_named(monkeypatch, version, runs):
    monkeypatch.setattr(transformers, "__version__", version)
    refusal = embedded_engine_refusal()
    assert (refusal is None) is runs
    if refusal is not None:
        assert f"Transformers {version} is installed" in refusal
        assert "pip install 'semblend-trt[embedded]'" in refusal
        assert "\n" not in refusal
