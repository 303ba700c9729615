"""A sentence model as one ONNX graph: token ids in, unit vectors out, pooling included."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from semblend_trt.errors import ConfigurationError
from semblend_trt.semantic.sentence_model import missing_extra
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.semantic.sentence_model import SentenceModel

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_vector"  # no operator of the graph goes by this name
OPSET = 18


class PooledEncoder(torch.nn.Module):
    """The encoder, the mean over its tokens, and the division by the length: what sentence-transformers runs.

    Raises ConfigurationError when `folder` holds no encoder that transformers knows.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        auto_model = imported("AutoModel")
        try:
            # Eager attention keeps the graph free of shapes that are branched on.
            model = auto_model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        except Exception as error:
            raise ConfigurationError(f"the embedder's model {folder} cannot be read: {error}") from error
        self._model = model
        self.eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Ids and mask int64 [batch, tokens] to unit vectors float32 [batch, dim]."""
        states = self._model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
        return torch.nn.functional.normalize(mean, dim=1)


def export(model: SentenceModel, path: Path) -> None:
    """Writes the graph to `path`, replacing it in one step.

    Raises ConfigurationError without onnxscript, or when the model cannot be exported or `path` not be written.
    """
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError:
        missing_extra("onnx", "onnxscript to export the model", "onnx")
    encoder = PooledEncoder(model.folder)
    # Two tensors: the exporter takes one object given twice for one input.
    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with _quiet(), torch.inference_mode():
            program = torch.onnx.export(
                encoder,
                (ids, mask),
                dynamo=True,
                opset_version=OPSET,
                input_names=list(INPUTS),
                output_names=[OUTPUT],
                dynamic_shapes=dict.fromkeys(INPUTS, sizes),
                verbose=False,
            )
    except Exception as error:
        raise ConfigurationError(f"the embedder's model {model.folder} cannot be exported: {error}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / path.name
            assert program is not None
            program.save(str(part), external_data=False)
            os.replace(part, path)
    except OSError as error:
        raise ConfigurationError(f"the exported model {path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs every step and every operator that it has no use for."""
    names = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
