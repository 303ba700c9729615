"""What pytest reads first, in xdist's controller too: that runs no test, so it does without torch and transformers."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

# Triton decides at its import whether its own functions can be interpreted, and transformers imports it.
if find_spec("triton") and not any(Path("/dev").glob("nvidia[0-9]*")):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401

# Without a network a name that is looked up at the hub is tried for 23 seconds; read at the hub's import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that starts the tests in the background has interrupts ignored, in every process that they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_modifyitems(items):
    """Begin with the longest files, each of which would run alone at the end."""
    longest = ("test_first_hour.py", "test_trtllm_check.py", "test_bounded.py", "test_quality.py")
    items.sort(key=lambda item: item.path.name not in longest)
