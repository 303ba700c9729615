"""What pytest reads first, in xdist's controller too: that runs no test, so it does without torch and transformers."""

import signal

# A shell that starts the tests in the background has interrupts ignored, in every process that they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_modifyitems(items):
    """Begin with the longest files, each of which would run alone at the end."""
    longest = ("test_first_hour.py", "test_trtllm_check.py", "test_bounded.py", "test_quality.py")
    items.sort(key=lambda item: item.path.name not in longest)
