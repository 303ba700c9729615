"""Reads the report of `pip install --report -` from standard input and writes a lock: every package with its hash."""

from __future__ import annotations

import json
import platform
import sys

HEADER = """\
# What CI installs: every file by its SHA-256, for Python {python} on Linux, {machine}, without a GPU.
# `make lock` makes this file; `make env` uses it on such a machine, and `make env LOCK=` goes without.
"""


def lock(report: dict) -> str:
    """The lock, sorted by name and without the package that is developed. Names no place that files came from."""
    lines = []
    for item in report["install"]:
        if "dir_info" in item["download_info"]:
            continue
        name = item["metadata"]["name"].lower().replace("_", "-")
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{digest}\n")
    python = ".".join(platform.python_version_tuple()[:2])
    return HEADER.format(python=python, machine=platform.machine()) + "".join(sorted(lines))


if __name__ == "__main__":
    sys.stdout.write(lock(json.load(sys.stdin)))
