"""Exports the sentence model of the embedders onnx and onnx_gpu: `python -m semblend_trt.semantic.export_embedder`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from semblend_trt.command_line import ended, named, printable
from semblend_trt.semantic.sentence_model import GRAPH_FILE, WEIGHTS_FILE, export, sentence_model

PROGRAM = "python -m semblend_trt.semantic.export_embedder"


def main(arguments: list[str] | None = None) -> int:
    """Writes a folder for the setting SEMBLEND_EMBEDDER_MODEL. Returns 0, or the status of `command_line.ended`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write: the ONNX graph, the weights and the tokenizer")
    parser.add_argument(
        "--model", type=named, help="folder or cached hub id of a sentence model; all-MiniLM-L6-v2 by default"
    )
    given = parser.parse_args(arguments)
    return ended(PROGRAM, lambda: _export(given.model, given.folder))


def _export(source: str | None, folder: Path) -> int:
    model = sentence_model(source, "onnx", "onnx")
    export(model, folder / GRAPH_FILE)
    for name in (WEIGHTS_FILE, "config.json", "tokenizer.json"):
        if (model.folder / name).resolve() != (folder / name).resolve():
            shutil.copyfile(model.folder / name, folder / name)
    sys.stdout.write(f"{printable(folder)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
