"""Says what is installed, what it fits, and what would be refused and why.

It looks at TensorRT-LLM and its connector contract, or with --engine at another engine; at the packages, the card, the
settings and the reuse profile; with --model at a model, and with --engine-options at the options of an engine. It exits
with 0 when all is fine, with 1 when something would be refused or fails, and with 2 for bad usage. Notes stop nothing
and leave the status at 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from semblend_trt import __version__
from semblend_trt.cli.config import settings_in_use
from semblend_trt.command_line import named, printable
from semblend_trt.config import Settings, load_settings, unknown_variables, why_ignored
from semblend_trt.doctor import Area, Finding
from semblend_trt.errors import ConfigurationError
from semblend_trt.reasons import advice

SUMMARY = "say what is installed, what it fits, and what would be refused"
AUTO = "auto"
KV_DTYPES = (AUTO, "float32", "bfloat16", "float16", "fp8", "int8", "nvfp4")
DISTRIBUTION = "semblend-trt"
# Entry points of this group are other engines. Each, called with model and options, yields findings and returns its
# EngineSpec.
_ENGINES = "semblend_trt.doctor"
# What embedders need beside the extra semantic.
EXTRAS = {"minilm": ("embedder",), "onnx": ("onnx",), "onnx_gpu": ("onnx-gpu",)}
# Of control groups, version 2 and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_software, _machine, _settings = map(Area, ("software", "machine", "settings"))


def configure(parser: argparse.ArgumentParser) -> None:
    about = "folder or hub id of the model that is to be served"
    parser.add_argument("--model", type=named, metavar="PATH_OR_ID", help=about)
    about = "dtype of the engine's KV cache (default: that of the engine's options, or the model's own)"
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default=AUTO, help=about)
    engines = ("trtllm", *sorted(metadata.entry_points(group=_ENGINES).names))
    parser.add_argument("--engine", choices=engines, default="trtllm", help="the engine to look at")
    about = "the YAML file that trtllm-serve gets as --extra_llm_api_options, or vllm serve as --config"
    parser.add_argument("--engine-options", metavar="FILE", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Look, print, and return 1 for a problem. Raises ConfigurationError for an options file without options."""
    from semblend_trt.doctor.trtllm import read_options

    llm_args = None if arguments.engine_options is None else read_options(arguments.engine_options)
    findings = list(_findings(arguments.model, arguments.kv_dtype, llm_args, arguments.engine))
    problems = sum(finding.is_problem for finding in findings)
    if arguments.json:
        report = {"version": __version__, "problems": problems, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return int(problems > 0)
    for area, of_area in groupby(findings, lambda finding: finding.area):
        sys.stdout.write(f"{area}\n")
        for finding in of_area:
            reason = "" if finding.reason is None else f"{finding.reason}: "
            sys.stdout.write(printable(f"  {finding.status:<7}  {reason}{finding.text}") + "\n")
    sys.stdout.write(f"\n{problems} problem{'s' * (problems != 1)}\n" if problems else "\nno problems\n")
    return int(problems > 0)


def _findings(name: str | None, kv_dtype: str, llm_args: Any, engine_name: str) -> Iterator[Finding]:
    from semblend_trt.doctor import model, trtllm

    arguments = settings = None
    if engine_name == "trtllm":
        yield from Area("engine").collect(trtllm.engine(llm_args))
        if kv_dtype == AUTO:
            kv_dtype = str(getattr(getattr(llm_args, "kv_cache_config", None), "dtype", None) or AUTO).lower()
    else:
        plugged = metadata.entry_points(group=_ENGINES)[engine_name].load()
        arguments, llm_args = (yield from Area("engine").collect(plugged(name, llm_args))), None
    given = {} if arguments is None else arguments.settings
    try:
        settings = load_settings(**given)
    except ConfigurationError as error:
        yield _settings.failed(str(error))
    yield from _software.collect(software(settings))
    yield from _machine.collect(machine(settings))
    yield from _settings.collect(variables(settings, given, has_trtllm=arguments is None))
    name = name if arguments is None else arguments.model
    yield from Area("model").collect(model.findings(name, kv_dtype, settings, arguments, llm_args))


def software(settings: Settings | None) -> Iterator[Finding]:
    """Yield findings of Python, our requirements and each extra; an extra that the settings need must be complete."""
    yield _software.ok(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        ours = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield _software.note(f"{DISTRIBUTION} is not installed as a package, so that its extras are not known")
        return
    needs, users = [Requirement(line) for line in ours.requires or ()], {"": "it"}
    if settings is not None and settings.enabled:
        kind = settings.embedder.value
        extras = () if kind == "off" else ("semantic", *EXTRAS.get(kind, ()))
        users |= dict.fromkeys(extras, f"SEMBLEND_EMBEDDER={kind}")
        users |= {} if settings.nats_url is None else {"nats": "SEMBLEND_NATS_URL"}
    for extra in ("", *sorted(set(ours.metadata.get_all("Provides-Extra") or ()) - {"dev"})):
        what = f"{DISTRIBUTION}[{extra}]" if extra else f"{DISTRIBUTION} {ours.version}"
        missing = ", ".join(filter(None, (_missing(need) for need in needs if _is_of(need, extra))))
        if not missing:
            yield _software.ok(f"{what} is complete")
        elif extra in users:
            yield _software.failed(f"{what} is not complete: {missing}; {users[extra]} needs it")
        else:
            yield _software.note(f"{what} is not complete: {missing}")


def _is_of(need: Requirement, extra: str) -> bool:
    """Return whether the extra brings the package, or without an extra we ourselves do."""
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        return not extra
    return need.marker.evaluate({"extra": extra})


def _missing(need: Requirement) -> str | None:
    try:
        found = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return f"{need.name}{need.specifier} is missing"
    is_known = need.specifier.contains(found, prereleases=True)
    return None if is_known else f"{need.name} is {found}, needed is {need.specifier}"


def machine(settings: Settings | None) -> Iterator[Finding]:
    """Yield whether torch sees the cards, and whether there is the memory that the settings ask for."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    for index, card in enumerate(cards):
        text = f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / (1 << 30):.1f} GiB"
        yield _machine.ok(f"CUDA device {index}: {text}")
    if not cards and any(Path("/dev").glob("nvidia[0-9]*")):
        yield _machine.failed(f"this machine has an NVIDIA card, but torch {torch.__version__} sees none")
    elif not cards:
        yield _machine.note("no CUDA device; models and kernels run on the CPU")
    elif find_spec("triton") is None:
        yield _machine.note("Triton is not installed: kernels run as PyTorch, much slower; install semblend-trt[gpu]")
    if settings is None:
        return
    # With a card, host memory is page-locked at the start and must be there at once. Without one all is host memory.
    on_card = ("device_bytes", "snapshot_bytes", "staging_bytes") if cards else ()
    on_host = ("host_bytes",) if cards else ("host_bytes", "device_bytes", "snapshot_bytes")
    memory = min((card.total_memory for card in cards), default=0)
    for place, tiers, has in (("a card here", on_card, memory), ("this machine", on_host, _host_memory())):
        sizes = {name: getattr(settings, name) for name in tiers}
        if sum(sizes.values()) > has:
            names = ", ".join(f"SEMBLEND_{name.upper()} ({size})" for name, size in sizes.items() if size)
            text = f"{place} has {has} bytes of memory, and {sum(sizes.values())} are asked for by {names}; lower them"
            yield _machine.failed(text) if cards else _machine.note(text)


def _host_memory() -> int:
    """Return the bytes of memory: the machine's, or less where the container's limit is lower."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # version 2 says "max" for no limit
            found.append(int(limit.read_text()))
    return min(found)


def variables(settings: Settings | None, options: dict[str, Any], *, has_trtllm: bool) -> Iterator[Finding]:
    """Yield what is not read, and settings that switch reuse off; another engine's options give `options`."""
    for name, close in unknown_variables(os.environ).items():
        if (why := why_ignored(name)) is not None:
            yield _settings.note(f"{name} is ignored: {why}")
        else:
            yield _settings.failed(f"{name} is not read" + (f"; did you mean {close}?" if close else ""))
    if settings is None:
        return
    rows = settings_in_use(settings)
    for row in rows:
        for ignored in row.ignored:
            yield _settings.note(f"{ignored} is set and not read, because {row.source} is set too")
    sources = [row.source for row in rows if row.source is not None and row.name not in options]
    given = sources + [f"{name} of the engine's options" for name in options]
    yield _settings.ok(f"{len(given)} of {len(rows)} settings are given" + (f": {', '.join(given)}" if given else ""))
    short = [name for name in sources if not name.startswith("TRTLLM")]
    if short and has_trtllm:
        yield _settings.note(
            f"TensorRT-LLM hands only variables that begin with TRTLLM on to its workers: give {', '.join(short)} with "
            "the prefix TRTLLM_SEMBLEND_ there"
        )
    refusal = "disabled" if not settings.enabled else "policy_off" if settings.policy.value == "off" else None
    if refusal is not None:
        yield _settings.refused(refusal, f"{advice(refusal)} Until then every request is served cold.")
