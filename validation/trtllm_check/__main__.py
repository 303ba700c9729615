"""`python -m validation.trtllm_check`: runs the connector inside a real TensorRT-LLM, and says what holds there.

Four engines of one model serve the same prompts, one after the other: without a connector, with ours, with ours
attached and every layer computed again, and with ours attached and nothing computed again. Then a reuse profile is
confirmed in the engine, or without --profile a small calibration makes one, and policy verified serves with it. At last
many requests are served at once over a small pool, and the blocks are counted before and after. Status: 0 when
everything holds, 1 naming what does not, 2 where tensorrt_llm cannot be imported, or model or profile cannot be read.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.command_line import ended, named
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import check_writable
from semblend_trt.printable import printable
from semblend_trt.reuse_profile import ReuseProfile
from validation.trtllm_check.findings import (
    EXACT,
    RECOMPUTED,
    REUSED,
    STOCK,
    Finding,
    judge,
    judge_crowd,
    judge_verified,
)
from validation.trtllm_check.served import Served, Workload, crowd, serve, serve_crowd, workload
from validation.trtllm_engine import STOCK_CONNECTOR, WRAPPER, trtllm_api

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
# Enough to see that a calibration runs here; what it finds is shown on few prompts.
_SMALL_CALIBRATION = (
    *("--families", "reordered,header_trap", "--groups", "4", "--screening-groups", "2", "--questions", "2"),
    *("--tokens", "1024", "--max-tries", "6"),
)
# 16 requests at once, two of each beginning.
_ROUNDS, _BEGINNINGS = 3, 8


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return ended("trtllm-check", lambda: _status(arguments))


def _status(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        check_writable(arguments.output)
    trtllm_api()
    if arguments.profile is not None:
        ReuseProfile.read(arguments.profile)
    try:
        layers = model_facts(arguments.model).num_layers
    except SemBlendError as error:
        raise ConfigurationError(f"{error}. A folder is named by its full path: make leaves its own.") from error
    holds = True
    for finding in _findings(arguments, layers):
        sys.stdout.write(
            printable(f"{finding.name:<12} {'holds' if finding.holds else 'FAILS'}  {finding.what}") + "\n"
        )
        holds = holds and finding.holds
    return 0 if holds else 1


def _findings(arguments: argparse.Namespace, layers: int) -> Iterator[Finding]:
    """One part after the other; a part whose engine does not start is one line that fails."""
    model, dtype = arguments.model, _dtype(arguments)
    asked = workload(arguments.groups, arguments.rows)
    try:
        served = {
            arm: serve(model, dtype, asked.prompts, connector, variables)
            for arm, (connector, variables) in _arms(layers).items()
        }
        yield from judge(asked, served)
    except SemBlendError as error:
        yield Finding("engine", False, str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.output or Path(folder) / "reuse-profile.json"
        try:
            yield from _profile(arguments, output, asked, served[STOCK])
        except (SemBlendError, OSError) as error:
            yield Finding("profile", False, str(error))
    try:
        yield from judge_crowd(serve_crowd(model, dtype, crowd(_ROUNDS, _BEGINNINGS, arguments.rows)))
    except SemBlendError as error:
        yield Finding("concurrency", False, str(error))


def _arms(num_layers: int) -> dict[str, tuple[str | None, dict[str, str]]]:
    """Each engine's connector and its settings."""
    recomputed = {"SEMBLEND_POLICY": "boundary", "SEMBLEND_RECOMPUTE_BOUNDARY_LAYER": str(num_layers)}
    return {
        STOCK: (None, {}),
        EXACT: (STOCK_CONNECTOR, {"SEMBLEND_POLICY": "exact"}),
        RECOMPUTED: (WRAPPER, recomputed),
        REUSED: (WRAPPER, {"SEMBLEND_POLICY": "position_fix"}),
    }


def _profile(arguments: argparse.Namespace, output: Path, asked: Workload, stock: Served) -> Iterator[Finding]:
    """Confirms the profile, or makes one; then what is served under it. Raises SemBlendError and OSError."""
    try:
        # Here: they need more than an environment with TensorRT-LLM and the connector may have.
        from validation.calibration.command import parse_calibrate, parse_confirm, run_calibrate, run_confirm
    except ModuleNotFoundError as error:
        yield Finding("profile", False, f"{error.name} is not installed; install it beside TensorRT-LLM for this part")
        return
    common = ("--engine", "trtllm", "--model", arguments.model, "--output", str(output))
    if arguments.profile is not None:
        options = ("--profile", str(arguments.profile), *common)
        if not run_confirm(parse_confirm(options), f"python -m validation confirm {shlex.join(options)}"):
            yield Finding("profile", False, "it is not as good as cold in this engine; the lines above say where")
            return
    else:
        made = (*common, "--dtype", arguments.dtype, *_SMALL_CALIBRATION)
        run_calibrate(parse_calibrate(made), f"python -m validation calibrate {shlex.join(made)}")
    profile = ReuseProfile.read(output)
    yield Finding("profile", True, f"policy {profile.policy} in {' and '.join(profile.engines)}; {profile.check}")
    variables = {"SEMBLEND_POLICY": "verified", "SEMBLEND_PROFILE": str(output)}
    verified = serve(arguments.model, _dtype(arguments), asked.prompts, WRAPPER, variables)
    yield judge_verified(asked, stock, verified)


def _dtype(arguments: argparse.Namespace) -> str:
    """The engines': a profile binds to the one with which it was made."""
    if arguments.profile is None or arguments.dtype != "auto":
        return str(arguments.dtype)
    return str(ReuseProfile.read(arguments.profile).namespace["compute_dtype"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m validation.trtllm_check", description=__doc__)
    parser.add_argument(
        "--model", type=named, default=DEFAULT_MODEL, help="a folder (full path) or a hub id (default: %(default)s)"
    )
    parser.add_argument("--groups", type=int, default=24, help="prompts of each kind (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=24, help="rows of each stock list (default: %(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="a profile from elsewhere, to be confirmed here")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the confirmed or made profile is kept")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="the engine's argument (default: the profile's, else auto)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
