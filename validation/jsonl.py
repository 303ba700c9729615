"""The user's own cases: one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from semblend_trt.errors import ConfigurationError
from validation.cases import Case, Expectation

_Text = Annotated[str, Field(min_length=1)]
WORKLOAD = "prompts"


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: _Text
    donors: list[_Text]
    prompt: _Text
    reference: _Text | None = None


def read_cases(path: str | Path) -> list[Case]:
    """Reads `{"id": str, "donors": [str, ...], "prompt": str, "reference": str or null}` a line.

    Empty lines are skipped. Raises ConfigurationError naming the file, and the line where one is at fault.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    cases: dict[str, Case] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        case = _case(line, f"{path}, line {number}")
        if case.id in cases:
            raise ConfigurationError(f"{path}, line {number}: the id {case.id!r} is used twice; ids must differ.")
        cases[case.id] = case
    if not cases:
        raise ConfigurationError(f"{path} holds no case; write one JSON object a line.")
    return list(cases.values())


def _case(line: bytes, where: str) -> Case:
    try:
        fields = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{where}: {name + ': ' if name else ''}{first['msg']}.") from error
    return Case(
        id=fields.id,
        workload=WORKLOAD,
        size="any",
        donors=tuple(fields.donors),
        prompt=fields.prompt,
        reference=fields.reference,
        known_answer=fields.reference is not None,
        expects=Expectation.ANY,
        group=fields.id,
    )
