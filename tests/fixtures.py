"""What the processes that run tests share: tiny random models, whose weights are seeded, and small disks."""

import logging
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from semblend_trt import model_files
from semblend_trt.background import OnceAMinute
from semblend_trt.connector import lookup
from semblend_trt.discovery.planner import Deadline
from tests.random_models import FAMILIES, save_tiny_model

# The same examples in every run; how long they take on a busy machine says nothing about the code.
settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory):
    """What the product keeps for its user is kept in folders of the tests, and tiny prompts are reused however busy
    the machine is, though computing them takes no longer."""
    digests = tmp_path_factory.mktemp("digests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("SEMBLEND_MIN_SAVING", "0")
        patch.setenv("SEMBLEND_LOOKUP_DEADLINE_MS", "2000")
        patch.setattr(model_files, "user_folder", lambda: digests)
        # Look-ups of this process have ten seconds, unless a test sets less than a millisecond.
        patch.setattr(
            lookup, "Deadline", lambda limit, tokens, least: Deadline(limit if limit < 1 else 10_000, tokens, least)
        )
        yield


@pytest.fixture(autouse=True)
def _minutes_of_tests():
    """A warning that an earlier test has seen is said again."""
    for each in logging.Logger.manager.loggerDict.values():
        for quiet in getattr(each, "filters", ()):
            if isinstance(quiet, OnceAMinute):
                quiet._kinds.clear()


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(size): a folder on a file system of `size` bytes."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mounted(size):
        asked = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "small", str(folder)]
        if subprocess.run(asked, check=False, capture_output=True).returncode:
            pytest.skip("skipped: this user may mount no file system")
        return folder

    yield mounted
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


@pytest.fixture(scope="session")
def tiny_model_paths(tmp_path_factory):
    """One model folder of each supported family."""
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(f"tiny-{family}")) for family in FAMILIES}


@pytest.fixture(scope="session")
def tiny_qwen2_path(tiny_model_paths):
    return tiny_model_paths["qwen2"]


@pytest.fixture(scope="session")
def tiny_llama_path(tiny_model_paths):
    return tiny_model_paths["llama"]


@pytest.fixture
def installed_subcommands(tmp_path_factory, monkeypatch):
    """The subcommands that `pyproject.toml` names, as this checkout installs them: the environment may be older."""
    folder = tmp_path_factory.mktemp("site") / "semblend_trt-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: semblend-trt\nVersion: 9.9\n")
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    groups = (part.partition("\n\n")[0] for part in project.read_text().split('[project.entry-points."')[1:])
    (folder / "entry_points.txt").write_text("\n".join("[" + each.replace('"', "") + "\n" for each in groups))
    monkeypatch.syspath_prepend(folder.parent)
