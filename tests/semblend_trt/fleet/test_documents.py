"""The schemas in docs/ are those of the structs, and an unknown kind's beside them."""

import json
from pathlib import Path

import msgspec
import pytest

from semblend_trt.fleet.connection import RESYNC_SUFFIX
from semblend_trt.fleet.events import MAX_METADATA_BYTES, SemanticKvEvent
from semblend_trt.fleet.wire import KIND_NAMES, MAX_MESSAGE_BYTES

DOCS = Path(__file__).resolve().parents[3] / "docs"
SCHEMA, ASYNCAPI = (
    json.loads((DOCS / name).read_text(encoding="utf-8")) for name in ("events.schema.json", "events.asyncapi.json")
)


def made(place):
    """The structs' schemas, by name; `place` is where a reference looks for them."""
    byte = {"type": "integer", "minimum": 0, "maximum": 255}
    _, schemas = msgspec.json.schema_components(
        [SemanticKvEvent],
        schema_hook=lambda _: {"type": "array", "items": byte, "maxItems": MAX_METADATA_BYTES},
        ref_template=place + "/{name}",
    )
    data = schemas["SemanticKvEvent"]["properties"]["data"]
    del data["discriminator"]  # which an unknown kind is not under
    data["anyOf"].append({"$ref": place + "/UnknownEvent"})
    return json.loads(json.dumps(schemas))


@pytest.mark.parametrize(
    ("schemas", "place"),
    [(SCHEMA["$defs"], "#/$defs"), (ASYNCAPI["components"]["schemas"], "#/components/schemas")],
    ids=["schema", "asyncapi"],
)
def test_documents_hold_the_schemas_of_the_structs(schemas, place):
    known = {name: schema for name, schema in schemas.items() if name not in ("UnknownEvent", "ResyncRequest")}
    assert known == made(place)
    assert schemas["UnknownEvent"]["properties"]["kind"]["not"] == {"enum": list(KIND_NAMES)}


def references(value):
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("document", [SCHEMA, ASYNCAPI], ids=["schema", "asyncapi"])
def test_every_reference_leads_somewhere(document):
    for reference in references(document):
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    assert references(document)


def test_the_asyncapi_document_names_the_kinds_and_limits_of_the_code():
    assert set(ASYNCAPI["components"]["messages"]) == {*KIND_NAMES, "resync_request"}
    assert ASYNCAPI["channels"]["resync"]["address"].endswith(RESYNC_SUFFIX)
    assert f" {MAX_MESSAGE_BYTES} bytes" in ASYNCAPI["info"]["description"]
