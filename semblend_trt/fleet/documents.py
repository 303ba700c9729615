"""JSON Schema and AsyncAPI document of the events, generated from the models in events.py.

`python -m semblend_trt.fleet.documents FOLDER` writes both; a test compares the files in docs/ with the models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from semblend_trt.fleet.connection import RESYNC_SUFFIX
from semblend_trt.fleet.events import KIND_NAMES, KINDS, MAX_MESSAGE_BYTES, SCHEMA_VERSION, SemanticKvEvent

SCHEMA_FILE = "events.schema.json"
ASYNCAPI_FILE = "events.asyncapi.json"
SUBJECT = "semantic-kv-events"


def json_schema() -> dict[str, Any]:
    """JSON Schema of one message, as readers validate it."""
    schema = SemanticKvEvent.model_json_schema(mode="validation")
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


def asyncapi() -> dict[str, Any]:
    """AsyncAPI 3.0 document of the event subject and of requests for a resync."""
    schema = SemanticKvEvent.model_json_schema(mode="validation", ref_template="#/components/schemas/{model}")
    schemas = {**schema.pop("$defs"), "SemanticKvEvent": schema}
    messages = {
        kind: {
            "title": kind,
            "summary": _first_sentence(model.__doc__),
            "contentType": "application/json",
            "payload": {
                "allOf": [
                    {"$ref": "#/components/schemas/SemanticKvEvent"},
                    {"properties": {"data": {"$ref": f"#/components/schemas/{model.__name__}"}}},
                ]
            },
        }
        for kind, model in zip(KIND_NAMES, KINDS, strict=True)
    }
    messages["resync_request"] = {
        "title": "resync_request",
        "summary": "Asks all workers, or the named one, to register all their donors again.",
        "contentType": "application/json",
        "payload": {"$ref": "#/components/schemas/ResyncRequest"},
    }
    schemas["ResyncRequest"] = {
        "type": "object",
        "properties": {"worker_id": {"type": "integer"}, "dp_rank": {"type": "integer"}},
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Donor events of SemBlend-TRT",
            "version": f"{SCHEMA_VERSION}.0.0",
            "description": f"Messages have at most {MAX_MESSAGE_BYTES} bytes. They are JSON, or MessagePack of "
            "the same shape. Readers ignore unknown kinds and fields.",
        },
        "defaultContentType": "application/json",
        "channels": {
            "events": _channel(SUBJECT, KIND_NAMES),
            "eventsOfOneWorker": {
                **_channel(SUBJECT + ".{worker_id}", KIND_NAMES),
                "description": "Used instead of events where each worker has a subject of its own.",
                "parameters": {"worker_id": {"description": "The worker_id of every message on the subject."}},
            },
            "resync": _channel(SUBJECT + RESYNC_SUFFIX, ("resync_request",)),
        },
        "operations": {
            "tellDonors": _operation("send", "events", KIND_NAMES),
            "takeRequests": _operation("receive", "resync", ("resync_request",)),
        },
        "components": {"messages": messages, "schemas": dict(sorted(schemas.items()))},
    }


def written(document: dict[str, Any]) -> str:
    """The text of a document's file."""
    return json.dumps(document, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    """Writes both documents to the folder that is the only argument."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m semblend_trt.fleet.documents FOLDER\n")
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCHEMA_FILE).write_text(written(json_schema()), encoding="utf-8")
    (folder / ASYNCAPI_FILE).write_text(written(asyncapi()), encoding="utf-8")
    return 0


def _channel(address: str, messages: tuple[str, ...]) -> dict[str, Any]:
    return {"address": address, "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages}}


def _operation(action: str, channel: str, messages: tuple[str, ...]) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"} for name in messages],
    }


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).split(". ")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
