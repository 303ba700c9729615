"""Which popular models are served, by the answers of the code itself to their published configurations.

`python -m benchmarks.evidence.models` counts them, and with `--page docs/models.md` writes that page's table. The
configurations are in `assets/models.json`, with their sources: of each `config.json` the fields that matter.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks.program import FOLDER, parser_of
from engine_wrapper.embedded.model_runner import SUPPORTED_MODEL_TYPES
from semblend_trt.connector.attention_layout import LLAMA4
from semblend_trt.doctor import Finding
from semblend_trt.doctor.model import AUTO, KnownModel, known_model
from semblend_trt.files import write_bytes
from validation.results import Results, table_of

GOAL = 18
_START, _END = "<!-- models -->\n", "<!-- /models -->"


@dataclass(frozen=True, slots=True)
class PublishedModel:
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
        size = "-" if answer.dtype is None else f"{answer.geometry().bytes_per_token(answer.dtype) / 1024:g} KiB"
        rows.append((f"`{model.name}`", size, shown))
    return table_of("model | KV a token | answer", rows) + "\n"


def with_table(text: str) -> str:
    """Return the page with a new table. Raises ValueError where it has no place for one."""
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not (start and end):
        raise ValueError(f"the page has no {_START.strip()} and {_END} around its table; put them there")
    return before + start + table() + end + after


def main(arguments: Sequence[str] | None = None) -> None:
    """Count those served, and make the table of `--page`."""
    parser = parser_of(__doc__, FOLDER)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table of this page")
    options, rows = parser.parse_args(arguments), Results(arguments, "cpu")
    served = sum(isinstance(model.answer(), KnownModel) for model in published())
    baseline = f"of {len(published())} popular models, by the connector's answers to their published config.json"
    rows.add("models_served", served, "models", baseline, GOAL, better="higher")
    rows.write(options.json, "models", FOLDER / str(rows.measured.machine["name"]))
    if options.page is not None:
        write_bytes(options.page, with_table(options.page.read_text(encoding="utf-8")).encode())


if __name__ == "__main__":
    main()
