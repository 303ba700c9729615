"""Reads reports of `pip install --report`, named or from standard input, and writes a lock, with every hash."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path

HEADER = """\
# What {user} installs: every file by its SHA-256, for Python {python} on Linux, {machine}, without a GPU.
# {makes}
"""
CI = ("CI", "`make lock` makes this file; `make env` uses it on such a machine, and `make env LOCK=` goes without.")
VLLM = ("`make vllm-env`", "`make vllm-lock` makes this file. vLLM is installed without what it requires beyond these.")
DYNAMO = (
    "`make dynamo-env`",
    "`make dynamo-lock` makes this file. It adds to what `make env` installs, and Dynamo goes without the rest.",
)
SGLANG = (
    "`make sglang-env`",
    "`make sglang-lock` makes this file. SGLang is installed without what it requires beyond these.",
)
LITELLM = ("`make litellm-env`", "`make litellm-lock` makes this file.")


def lock(reports: list[dict], user: str, makes: str) -> str:
    """The lock, sorted by name and without the package that is developed. Names no place that files came from."""
    lines = []
    for item in (item for report in reports for item in report["install"]):
        if "dir_info" in item["download_info"]:
            continue
        name = item["metadata"]["name"].lower().replace("_", "-")
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{digest}\n")
    python = ".".join(platform.python_version_tuple()[:2])
    return HEADER.format(user=user, makes=makes, python=python, machine=platform.machine()) + "".join(sorted(lines))


def bounds(report: dict) -> str:
    """What the reported packages themselves require, as constraints, which know no extras."""
    needs = [need for item in report["install"] for need in item["metadata"]["requires_dist"] if "extra ==" not in need]
    return "".join(re.sub(r"\[.*?\]", "", need, count=1) + "\n" for need in needs)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bounds"]:
            text = bounds(json.load(sys.stdin))
        case ["litellm"]:
            text = lock([json.load(sys.stdin)], *LITELLM)
        case []:
            text = lock([json.load(sys.stdin)], *CI)
        case ["dynamo"]:
            text = lock([json.load(sys.stdin)], *DYNAMO)
        case ["sglang", *paths]:
            text = lock([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths], *SGLANG)
        case paths:
            text = lock([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths], *VLLM)
    sys.stdout.write(text)
