"""The documents name what exists: settings, commands, classes, files; tests beside the code compare their tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import engine_wrapper.connector
import semblend_trt.connector
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig, LlmArgs
from semblend_trt.cli.main import subcommands
from semblend_trt.config import settings_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
ATTACH = PAGES["attach.md"]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\((?!\w+://|#)([^)#]+)", PAGES[name])
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_settings_exist(name: str) -> None:
    known = {variable for row in settings_table() for variable in row.variables}
    named = set(re.findall(r"\b(?:TRTLLM_)?SEMBLEND_[A-Z_]*[A-Z]\b", PAGES[name])) - {"SEMBLEND_X", "TRTLLM_SEMBLEND_X"}
    assert named <= known


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    assert set(re.findall(r"\bsemblend-trt (?!-)([a-z]+)", PAGES[name])) <= set(subcommands())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", PAGES[name], re.MULTILINE)) <= targets


def test_the_engine_file_can_be_read_by_an_engine() -> None:
    """The embedded engine has the names of its arguments from TensorRT-LLM."""
    (source,) = re.findall(r"^```yaml\n(.*?)^```$", ATTACH, re.DOTALL | re.MULTILINE)
    options = yaml.safe_load(source)
    assert set(options) <= set(LlmArgs.model_fields)
    assert set(options["kv_cache_config"]) <= {*KvCacheConfig.model_fields, "free_gpu_memory_fraction"}
    connector = KvCacheConnectorConfig(**options["kv_connector_config"])
    modules = {module.__name__: module for module in (semblend_trt.connector, engine_wrapper.connector)}
    assert set(re.findall(r"`(\w+\.connector)`", ATTACH)) | {connector.connector_module} == set(modules)
    for module in modules.values():
        assert hasattr(module, connector.connector_scheduler_class)
        assert hasattr(module, connector.connector_worker_class)


def test_it_is_said_that_nothing_of_it_was_tested() -> None:
    """As long as no run on a real TensorRT-LLM is recorded, the first words of the guide say so."""
    assert ATTACH.split("\n\n")[1].startswith("**All of this is untested on a real TensorRT-LLM.**")
