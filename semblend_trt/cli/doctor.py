"""Says what is installed, what it fits, and what would be refused and why.

It looks at the packages, TensorRT-LLM and its connector contract, the card, the settings and what they name (a NATS
server, folders, a reuse profile), with --model at a model, and with --engine-options at those of an engine; with
--engine vllm it looks at vLLM in TensorRT-LLM's place. It exits
with 0 when all is fine, with 1 when something would be refused or fails, and with 2 for bad usage. Notes stop nothing
and leave the status at 0.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from semblend_trt.command_line import named, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from semblend_trt.config import Settings
    from semblend_trt.doctor.finding import Finding

SUMMARY = "say what is installed, what it fits, and what would be refused"
AUTO = "auto"
KV_DTYPES = (AUTO, "float32", "bfloat16", "float16", "fp8", "int8", "nvfp4")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds what the doctor is to look at."""
    parser.add_argument(
        "--model", type=named, metavar="PATH_OR_ID", help="folder or hub id of the model that is to be served"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default=AUTO,
        help="dtype of the engine's KV cache (default: that of the engine's options, or the model's own)",
    )
    parser.add_argument("--engine", choices=("trtllm", *_plugged()), default="trtllm", help="the engine to look at")
    parser.add_argument(
        "--engine-options",
        metavar="FILE",
        help="the YAML file that trtllm-serve gets as --extra_llm_api_options, or vllm serve as --config",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Looks and prints. Returns 1 when something would be refused or fails. Raises ConfigurationError when there are no
    options in the file that is named."""
    from semblend_trt import __version__
    from semblend_trt.doctor.trtllm import read_options

    llm_args = None if arguments.engine_options is None else read_options(arguments.engine_options)
    findings = list(_findings(arguments.model, arguments.kv_dtype, llm_args, arguments.engine))
    problems = sum(finding.is_problem for finding in findings)
    if arguments.json:
        report = {"version": __version__, "problems": problems, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2, default=str) + "\n")
    else:
        sys.stdout.write(_shown(findings))
        sys.stdout.write(f"\n{problems} problem{'s' * (problems != 1)}\n" if problems else "\nno problems\n")
    return int(problems > 0)


def _plugged() -> dict[str, metadata.EntryPoint]:
    """Other engines by name, each with what looks at one, told by the package that serves it.

    It is called with the model and the options, yields findings, and returns the engine's arguments as a connector
    reads them, or None.
    """
    return {point.name: point for point in metadata.entry_points(group="semblend_trt.doctor")}


def _findings(name: str | None, kv_dtype: str, llm_args: Any, engine_name: str) -> Iterator[Finding]:
    from semblend_trt.doctor import machine, software, trtllm
    from semblend_trt.doctor import settings as settings_checks
    from semblend_trt.doctor.finding import Area

    arguments = None
    if engine_name in _plugged():
        arguments = yield from Area("engine").collect(_plugged()[engine_name].load()(name, llm_args))
        llm_args = None
    given = None if arguments is None else arguments.settings
    name = name if arguments is None else arguments.model
    settings, problem = _settings(given or {})
    yield from Area("software").collect(software.software(settings))
    if settings is not None:
        yield from Area("software").collect(software.embedder(settings))
    if engine_name not in _plugged():
        yield from Area("engine").collect(trtllm.engine())
    yield from Area("machine").collect(machine.machine(settings))
    yield from Area("settings").collect(settings_checks.variables(settings, problem, given))
    if settings is not None:
        yield from Area("fleet").collect(settings_checks.nats(settings))
        yield from Area("files").collect(settings_checks.disk(settings))
        yield from Area("files").collect(settings_checks.audit(settings))
    if llm_args is not None:
        yield from Area("options").collect(trtllm.options(llm_args, settings))
        kv_dtype = trtllm.kv_dtype_of(llm_args) if kv_dtype == AUTO else kv_dtype
    yield from Area("model").collect(_of_model(name, kv_dtype, settings, llm_args, arguments))


def _of_model(
    name: str | None, kv_dtype: str, settings: Settings | None, llm_args: Any, arguments: Any
) -> Iterator[Finding]:
    from semblend_trt.doctor import machine, model
    from semblend_trt.doctor.finding import Finding

    known = None if name is None else model.known_model(name, kv_dtype, arguments, llm_args)
    if isinstance(known, Finding):
        yield known
        return
    if known is not None:
        yield from model.model(known, settings)
        yield from machine.pool(llm_args, known)
    if settings is not None:
        yield from model.profile(settings, known)


def _settings(given: dict[str, Any]) -> tuple[Settings | None, str | None]:
    from semblend_trt.config import load_settings
    from semblend_trt.errors import ConfigurationError

    try:
        return load_settings(**given), None
    except ConfigurationError as error:
        return None, str(error)


def _shown(findings: list[Finding]) -> str:
    lines, area = [], ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            lines.append(area)
        reason = "" if finding.reason is None else f"{finding.reason}: "
        lines.append(printable(f"  {finding.status.value:<7}  {reason}{finding.text}"))
    return "".join(line + "\n" for line in lines)
