"""Exports the sentence model of the embedders onnx and onnx_gpu: `python -m semblend_trt.discovery.export_embedder`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from semblend_trt.discovery.embedders.onnx import GRAPH_FILE
from semblend_trt.discovery.embedders.onnx_export import export
from semblend_trt.discovery.embedders.sentence_model import WEIGHTS_FILE, sentence_model
from semblend_trt.errors import ConfigurationError


def main(arguments: list[str] | None = None) -> int:
    """Writes a folder that serves as the embedder's model; 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m semblend_trt.discovery.export_embedder", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write: the ONNX graph, the weights and the tokenizer")
    parser.add_argument("--model", help="folder or cached hub id of a sentence model; all-MiniLM-L6-v2 by default")
    given = parser.parse_args(arguments)
    try:
        model = sentence_model(given.model, "onnx", "onnx")
        export(model, given.folder / GRAPH_FILE)
        for name in (WEIGHTS_FILE, "config.json", "tokenizer.json"):
            if (model.folder / name).resolve() != (given.folder / name).resolve():
                shutil.copyfile(model.folder / name, given.folder / name)
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{given.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
