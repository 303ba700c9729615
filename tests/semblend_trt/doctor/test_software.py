"""What is installed is read from the packages' own metadata; an extra has to be complete where a setting needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from semblend_trt.config import load_settings
from semblend_trt.doctor.finding import Status
from semblend_trt.doctor.software import embedder, software

if TYPE_CHECKING:
    from pathlib import Path

METADATA = """Metadata-Version: 2.4
Name: semblend-trt
Version: 9.9
Requires-Dist: numpy>={numpy}
Provides-Extra: dev
Requires-Dist: a-linter; extra == 'dev'
Provides-Extra: nats
Requires-Dist: nats-py>=2.9; extra == 'nats'
Requires-Dist: no-such-package>=1; extra == 'nats'
Provides-Extra: metrics
Requires-Dist: numpy>=1; extra == 'metrics'
Provides-Extra: semantic
Requires-Dist: no-such-index>=1; extra == 'semantic'
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """install(numpy): a semblend-trt 9.9 that needs this numpy is found before any other."""

    def make(numpy: str) -> None:
        folder = tmp_path / "semblend_trt-9.9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(METADATA.format(numpy=numpy))
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_extras_are_complete_or_not(install) -> None:
    install("1.0")
    python, base, metrics, nats, _ = software(load_settings())
    assert python.text.startswith("Python 3.")
    assert (base.status, base.text.split(" with ")[0]) == (Status.OK, "semblend-trt 9.9")
    assert metrics.status is Status.OK
    assert (nats.status, nats.details["missing"]) == (Status.NOTE, ["no-such-package>=1 is missing"])


@pytest.mark.parametrize(("enabled", "status"), [(True, Status.FAILED), (False, Status.NOTE)])
def test_a_setting_that_needs_an_extra_makes_it_a_problem(install, enabled: bool, status: Status) -> None:
    install("1.0")
    *_, nats, _ = software(load_settings(nats_url="nats://127.0.0.1:4222", enabled=enabled))
    assert nats.status is status
    assert ("SEMBLEND_NATS_URL needs it, install semblend-trt[nats]" in nats.text) is enabled


@pytest.mark.parametrize(("embedder", "status"), [("off", Status.NOTE), ("static", Status.FAILED)])
def test_an_embedder_needs_the_extra_of_its_index(install, embedder: str, status: Status) -> None:
    install("1.0")
    *_, semantic = software(load_settings(embedder=embedder))
    assert semantic.status is status
    told = f"SEMBLEND_EMBEDDER={embedder} needs it, install semblend-trt[semantic]"
    assert (told in semantic.text) is (status is Status.FAILED)


def test_a_package_that_is_too_old_is_a_problem(install) -> None:
    install("999")
    _, base, *_ = software(None)
    assert base.status is Status.FAILED
    assert base.details["missing"][0].endswith("needed is >=999")


def test_the_sentence_model_has_to_be_here(tmp_path: Path) -> None:
    (off,) = embedder(load_settings())
    assert (off.status, off.text) == (Status.OK, "SEMBLEND_EMBEDDER=off: no semantic neighbours are reported")
    (unread,) = embedder(load_settings(embedder="static", embedder_model=str(tmp_path)))
    assert (unread.status, "embedder static runs no model" in unread.text) == (Status.NOTE, True)
    (failed,) = embedder(load_settings(embedder="minilm", embedder_model=str(tmp_path)))
    assert (failed.status, str(tmp_path) in failed.text) == (Status.FAILED, True)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (found,) = embedder(load_settings(embedder="onnx", embedder_model=str(tmp_path)))
    assert (found.status, found.text) == (Status.OK, f"embedder onnx runs the model in {tmp_path}")
