"""Where and with what a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

_DISTRIBUTIONS = ("semblend-trt", "torch", "transformers", "numpy", "triton", "rouge-score", "vllm")


def versions() -> dict[str, str]:
    """Python and the distributions that decide a figure, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(device: str, name: str | None = None) -> dict[str, Any]:
    """The machine as a result row shows it; `name` is the folder of its results, derived when not given."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "name": name or slug(device),
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def slug(device: str) -> str:
    """`cpu-2core`, or the GPU's name such as `nvidia-h200`."""
    if not device.startswith("cuda"):
        return f"cpu-{cores()}core"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
