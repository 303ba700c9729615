"""Which popular models are served, by the answers of the code itself to their published configurations.

`python -m benchmarks.evidence.models --page docs/models.md` writes that page's table. The configurations are in
`assets/models.json`, with their sources: of each `config.json` the fields that matter."""

import argparse
import json
import re
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from engine_wrapper.embedded.model_runner import SUPPORTED_MODEL_TYPES
from semblend_trt.connector.attention_layout import LLAMA4
from semblend_trt.doctor import Finding
from semblend_trt.doctor.model import AUTO, KnownModel, known_model
from semblend_trt.files import write_bytes
from validation.results import table_of

_TABLE = re.compile(r"(<!-- models -->\n).*?(<!-- /models -->)", re.DOTALL)


class PublishedModel(NamedTuple):
    """A model by its name on the hub. `config`: of its config.json the fields that matter, read at `source`."""

    name: str
    source: str
    config: dict[str, Any]

    def answer(self) -> KnownModel | Finding:
        """Return what the connector says to this configuration."""
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            self.save(Path(folder))
            return known_model(folder, AUTO)

    def save(self, folder: Path) -> None:
        """Write its config.json."""
        write_bytes(folder / "config.json", json.dumps(self.config).encode())


@cache
def published() -> tuple[PublishedModel, ...]:
    """Return all models that the page lists, in its order."""
    content = json.loads((files("validation") / "assets" / "models.json").read_text(encoding="utf-8"))
    return tuple(PublishedModel(name, **fields) for name, fields in content.items())


def table() -> str:
    """Return the page's table."""
    rows = list[tuple[str, str, str]]()
    for model in published():
        if not isinstance(answer := model.answer(), KnownModel):
            # The sentence without its list of what is served.
            rows.append((f"`{model.name}`", "-", f"refused, `{answer.reason}`: {answer.text.partition(': ')[0]}"))
            continue
        is_embedded = answer.facts.takes_images or answer.facts.model_type in SUPPORTED_MODEL_TYPES
        shown = "served for text" if answer.facts.takes_images else "served"
        shown += "" if is_embedded else ", but not by the embedded engine"
        shown += ", but not in TensorRT-LLM" if answer.facts.model_type in LLAMA4 else ""
        size = "-" if answer.dtype is None else f"{answer.facts.sizes(1).bytes_per_token(answer.dtype) / 1024:g} KiB"
        rows.append((f"`{model.name}`", size, shown))
    return table_of("model | KV a token | answer", rows) + "\n"


def with_table(text: str) -> str:
    """Return the page with a new table. Raises ValueError where it has no place for one."""
    made, count = _TABLE.subn(lambda marks: marks[1] + table() + marks[2], text)
    if not count:
        raise ValueError("the page has no <!-- models --> and <!-- /models --> around its table; put them there")
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, metavar="FILE", required=True, help="write the table of this page")
    page = parser.parse_args().page
    write_bytes(page, with_table(page.read_text(encoding="utf-8")).encode())
