"""docs/first-hour.md runs from its second step on, as far as a CPU goes; the commands of engines parse."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from semblend_trt.errors import ConfigurationError
from tests.pages import Page
from tests.server_process import ended
from validation.models import smollm2_folder

INSTALL, LOOK, ESTIMATE, CALIBRATE, SERVE, VLLM, SGLANG = Page("docs/first-hour.md").blocks("bash")
# What `pip install` and a virtual environment leave behind is what runs this test.
STEPS = (LOOK, ESTIMATE, CALIBRATE, SERVE)


@pytest.mark.last_step
def test_its_commands_lead_from_nothing_to_a_receipt(tmp_path):
    try:
        smollm2_folder()
    except ConfigurationError as error:
        pytest.skip(str(error))
    script = "set -euo pipefail\ntrap 'kill ${SERVER:-} 2>/dev/null || true' EXIT\n" + "".join(STEPS)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = ended("bash", "-c", script, cwd=tmp_path, PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert "added by donors" in printed
    assert json.loads((tmp_path / "reuse-profile.json").read_text())
    cold, again = (json.loads(line.removeprefix("receipt ")) for line in printed.splitlines() if line[:8] == "receipt ")
    assert (cold["outcome"], again["policy"]) == ("cold_fallback", "verified")
    # Its text is found; whether these few prompts have shown a bound decides what becomes of it.
    is_found = again["reused_tokens"] + (again["recomputed_tokens"] or 0) > 0
    assert is_found or again["reason"] in ("no_bound", "not_exact")
    assert 'semblend_requests_total{outcome="cold_fallback"}' in printed
    assert '"request_settled"' in (tmp_path / "audit.jsonl").read_text()


@pytest.mark.every_version
def test_vllm_takes_its_command():
    serve = pytest.importorskip("vllm.entrypoints.cli.serve")
    parser = pytest.importorskip("vllm.utils.argparse_utils").FlexibleArgumentParser()
    program, *words = shlex.split(VLLM.replace('"$MODEL"', "MODEL"))
    assert program == "vllm"
    serve.ServeSubcommand().subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    options = parser.parse_args(words)
    assert options.model_tag == "MODEL"
    given = options.kv_transfer_config
    assert (given.kv_connector, given.kv_connector_module_path) == ("SemBlendConnector", "engine_wrapper.vllm")
    assert given.kv_connector_extra_config["profile"] == "reuse-profile.json"


def test_sglang_takes_its_command():
    server_args = pytest.importorskip("sglang.srt.server_args")
    *_, program, flag, module = shlex.split(SGLANG)[:4]
    assert (program, flag, module) == ("python", "-m", "sglang.launch_server")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    assert parser.parse_args(shlex.split(SGLANG)[4:]).radix_cache_backend == "semblend"
