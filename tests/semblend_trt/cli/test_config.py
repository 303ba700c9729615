"""`semblend-trt config` prints every setting with its source, in three forms."""

import json
import os

import pytest

from semblend_trt.cli.main import main
from semblend_trt.config import PREFIXES, Settings, variables_of
from tests.pages import Page, code_in


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRTLLM_SEMBLEND_HOST_BYTES", "1024")
    monkeypatch.setenv("SEMBLEND_HOST_BYTES", "2048")
    monkeypatch.setenv("SEMBLEND_NATS_TOKEN", "hunter2")
    monkeypatch.setenv("SEMBLEND_POLICI", "off")


@pytest.mark.promise("commands", "`semblend-trt config` prints each setting, its value and source, and masks secrets")
def test_a_line_a_setting(capsys):
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.splitlines()}
    assert len(lines) == len(Settings.model_fields)
    assert lines["SEMBLEND_POLICY"] == ["verified", "default"]
    told = "TRTLLM_SEMBLEND_HOST_BYTES (SEMBLEND_HOST_BYTES set too, and not read)"
    assert lines["SEMBLEND_HOST_BYTES"] == ["1024", told]
    assert "hunter2" not in shown


def test_json(capsys):
    assert main(["config", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in told["settings"]}
    assert set(rows) == set(Settings.model_fields)
    sources = {"source": "TRTLLM_SEMBLEND_HOST_BYTES", "ignored": ["SEMBLEND_HOST_BYTES"]}
    assert rows["host_bytes"] == {"name": "host_bytes", "variable": "SEMBLEND_HOST_BYTES", "value": 1024} | sources
    assert rows["enabled"]["value"] is True
    assert rows["nats_token"]["value"] != "hunter2"
    assert told["unknown"] == {"SEMBLEND_POLICI": "SEMBLEND_POLICY"}


@pytest.mark.promise("commands", "`docs/configuration.md` lists every setting, and every setting is read")
def test_the_page_in_the_repository_is_that_of_the_code(capsys):
    """`semblend-trt config --markdown > docs/configuration.md` makes it."""
    page = Page("docs/configuration.md")
    assert main(["config", "--markdown"]) == 0
    assert page.text == capsys.readouterr().out
    rows = [code_in(row[0])[0] for row in page.rows if "`" in row[0]]
    assert sorted(rows) == sorted(variables_of(name)[1] for name in Settings.model_fields)
