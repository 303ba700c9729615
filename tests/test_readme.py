"""The README does what it says: its code runs, its tables are those of the product, its commands and paths exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine_wrapper.connector
import semblend_trt.connector
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig, LlmArgs
from semblend_trt.config import settings_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONNECTORS = {module.__name__: module for module in (semblend_trt.connector, engine_wrapper.connector)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def keywords_of(source: str, function: str) -> dict[str, ast.expr]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    (call,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == function)
    return {keyword.arg or "": keyword.value for keyword in call.keywords}


def test_the_quick_start_prints_what_the_readme_says(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "SEMBLEND_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks("text")[0]


@pytest.mark.parametrize("source", blocks("python"), ids=["quick start", "TensorRT-LLM"])
def test_connector_examples_name_classes_that_exist(source: str) -> None:
    config = {name: ast.literal_eval(value) for name, value in keywords_of(source, "KvCacheConnectorConfig").items()}
    KvCacheConnectorConfig(**config)
    connector = CONNECTORS[config["connector_module"]]
    assert hasattr(connector, config["connector_scheduler_class"])
    assert hasattr(connector, config["connector_worker_class"])


def test_the_tensorrt_llm_example_uses_arguments_that_the_embedded_engine_has_too() -> None:
    source = blocks("python")[1]
    assert set(keywords_of(source, "LLM")) <= set(LlmArgs.model_fields)
    assert set(keywords_of(source, "KvCacheConfig")) <= set(KvCacheConfig.model_fields)


def test_every_setting_that_is_named_exists() -> None:
    known = {name for row in settings_table() for name in row.variables}
    named = set(re.findall(r"\bSEMBLEND_[A-Z_]*[A-Z]\b", README)) - {"SEMBLEND_X"}
    assert named
    assert named <= known


def test_commands_and_paths_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
    paths = re.findall(r"`([\w./]+/[\w./]*)`", README)
    assert [path for path in paths if not (ROOT / path).exists()] == []
