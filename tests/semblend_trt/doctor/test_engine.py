"""The contract of an installed TensorRT-LLM is told by what its module has, not by its number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from semblend_trt.connector.contract import match_of
from semblend_trt.doctor.engine import engine
from semblend_trt.doctor.finding import Status

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "import sys; from semblend_trt.cli.main import main; sys.exit(main(['doctor', '--json']))"
OLD = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
NEW = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"

# As in NVIDIA/TensorRT-LLM, `_torch/pyexecutor/kv_cache_connector.py` (1.1, 1.2) and
# `_torch/pyexecutor/connectors/kv_cache_connector.py` (1.3 release candidates, main).
FIELDS = ["request_id", "new_tokens", "new_block_ids", "computed_position", "num_scheduled_tokens"]
SCHEDULER = ["build_connector_meta", "get_num_new_matched_tokens", "request_finished", "update_state_after_alloc"]
WORKER = [
    "register_kv_caches",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
]
GROUPS = ["update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"]
CALLABLE = "register_forward_pass_callable"
RELEASES = {
    "1.1": (OLD, FIELDS, [], []),
    "1.2": (OLD, FIELDS, [], [CALLABLE]),
    "1.3rc": (NEW, [*FIELDS, "priorities", "cache_salt_id"], ["wait_for_initialization"], [CALLABLE]),
    "main": (
        NEW,
        [*FIELDS, "block_hashes", "priorities", "cache_salt", "new_block_ids_by_layer_group"],
        ["wait_for_initialization", *GROUPS],
        [CALLABLE, "register_kv_cache_layout"],
    ),
}


def source_of(fields: list[str], scheduler: list[str], worker: list[str], abstract: list[str]) -> str:
    """A module with TensorRT-LLM's RequestData and base classes; `abstract` are more methods that a scheduler needs."""
    lines = [
        "from abc import ABC, abstractmethod",
        "from dataclasses import dataclass",
        "@dataclass",
        "class RequestData:",
    ]
    lines += [f"    {name}: object = None" for name in fields]
    for kind, needed, optional in (
        ("KvCacheConnectorScheduler", [*SCHEDULER, *abstract], scheduler),
        ("KvCacheConnectorWorker", WORKER, ["bind_connector_meta", "get_connector_meta", *worker]),
    ):
        lines += [f"class {kind}(ABC):", "    def __init__(self, llm_args): self._llm_args = llm_args"]
        lines += [f"    @abstractmethod\n    def {name}(self, *arguments): ..." for name in needed]
        lines += [f"    def {name}(self, *arguments): ..." for name in optional]
    return "\n".join(lines) + "\n"


def module_of(release: str, extra_field: str | None = None) -> ModuleType:
    path, fields, scheduler, worker = RELEASES[release]
    module = ModuleType(path)
    sys.modules[path] = module  # dataclasses look their module up
    try:
        exec(source_of([*fields, *filter(None, [extra_field])], scheduler, worker, []), module.__dict__)
    finally:
        del sys.modules[path]
    return module


@pytest.mark.parametrize("release", RELEASES)
def test_each_version_is_known_by_what_it_has(release: str) -> None:
    match = match_of(module_of(release))
    assert (match.version.name, match.differences) == (release, ())


def test_what_is_not_known_is_told() -> None:
    match = match_of(module_of("main", "pool_generation"))
    assert match.version.name == "main"
    assert match.differences == ("field RequestData.pool_generation is there too",)


@pytest.mark.parametrize(("version", "serves"), [("4.53.1", False), ("4.57.6", False), ("5.0.0", True)])
def test_the_embedded_engine_is_promised_only_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, version: str, serves: bool
) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    (found,) = engine()
    assert (found.status is Status.NOTE) is serves
    if not serves:
        assert found.status is Status.FAILED
        assert f"TensorRT-LLM is not installed, and Transformers {version} is installed" in found.text


def doctor_beside(folder: Path, release: str, abstract: list[str]) -> tuple[int, list[dict[str, object]]]:
    """Status and findings of the doctor in a process that finds such a TensorRT-LLM."""
    path, fields, scheduler, worker = RELEASES[release]
    file = folder / (path.replace(".", "/") + ".py")
    file.parent.mkdir(parents=True)
    file.write_text(source_of(fields, scheduler, worker, abstract))
    environment = {name: value for name, value in os.environ.items() if "SEMBLEND_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env=environment | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)["findings"]
    return done.returncode, [finding for finding in found if finding["area"] == "engine"]


def test_an_installed_engine_gets_our_connector(tmp_path: Path) -> None:
    status, (contract, ours) = doctor_beside(tmp_path, "1.2", [])
    assert (status, contract["status"], ours["status"]) == (0, "ok", "ok")
    assert contract["details"] == {"tensorrt_llm": "of unknown version", "module": OLD, "contract": "1.2"}


def test_an_engine_that_asks_for_more_cannot_make_our_connector(tmp_path: Path) -> None:
    status, (_, ours) = doctor_beside(tmp_path, "main", ["rewind"])
    assert (status, ours["status"]) == (1, "failed")
    assert ours["details"] == {"missing": ["SemBlendKvConnectorScheduler.rewind"]}
