"""The documents in docs/ are those of the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semblend_trt.fleet import documents
from semblend_trt.fleet.events import KIND_NAMES

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize(
    ("name", "made"),
    [(documents.SCHEMA_FILE, documents.json_schema), (documents.ASYNCAPI_FILE, documents.asyncapi)],
)
def test_documents_are_the_models_own(name, made) -> None:
    told = "run: python -m semblend_trt.fleet.documents docs"
    assert (DOCS / name).read_text(encoding="utf-8") == documents.written(made()), told


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("made", [documents.json_schema, documents.asyncapi])
def test_every_reference_leads_somewhere(made) -> None:
    document = json.loads(documents.written(made()))
    for reference in references(document):
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    assert references(document)


def test_every_kind_has_a_message() -> None:
    assert set(documents.asyncapi()["components"]["messages"]) == {*KIND_NAMES, "resync_request"}


def test_writing_takes_one_folder(tmp_path, capsys) -> None:
    assert documents.main([str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {documents.SCHEMA_FILE, documents.ASYNCAPI_FILE}
    assert documents.main([]) == 2
    assert "usage" in capsys.readouterr().err
