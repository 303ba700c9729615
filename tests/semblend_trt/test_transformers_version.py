"""Names of Transformers for any thread; its oldest version that the embedded engine runs with is that of the extras."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tomllib
import transformers

from semblend_trt.transformers_version import MIN_TRANSFORMERS, embedded_engine_refusal, imported

ROOT = Path(__file__).resolve().parents[2]


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
