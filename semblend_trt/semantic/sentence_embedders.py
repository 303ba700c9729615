"""The sentence model run by sentence-transformers, or as an ONNX graph by ONNX Runtime on the CPU or a CUDA device."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import tokenizer_file
from semblend_trt.semantic.sentence_model import (
    BATCH_WINDOWS,
    WINDOW_TOKENS,
    missing_extra,
    pooled,
    sentence_model,
)
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from semblend_trt.semantic.sentence_model import SentenceModel

GRAPH_FILE = "embedder.onnx"
INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_vector"  # no operator of the graph has this name
OPSET = 18


class MiniLmEmbedder:
    """A sentence-transformer on the CPU. Longer texts are cut into overlapping windows, whose vectors are averaged.

    Raises ConfigurationError without sentence-transformers, or without the model's files on this machine.
    """

    def __init__(self, model: str | Path | None = None) -> None:
        try:
            kind = imported("SentenceTransformer", "sentence_transformers")
        except ImportError:
            missing_extra("minilm", "sentence-transformers", "embedder")
        files = sentence_model(model, "minilm", "embedder")
        try:
            self._model = kind(str(files.folder), device="cpu", local_files_only=True)
        except Exception as error:
            raise ConfigurationError(f"embedder minilm: {files.folder} is no sentence model: {error}") from error
        self._tokenizer = tokenizer_file(files.folder)
        self.dim = int(self._model.encode(["a"], show_progress_bar=False).shape[1])

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), dim] of unit length; a text without a word gets zeros."""
        return pooled(texts, self._tokenizer, self.dim, self._embed_windows)

    def _embed_windows(self, windows: list[str]) -> npt.NDArray[np.float32]:
        vectors = self._model.encode(
            windows, batch_size=BATCH_WINDOWS, show_progress_bar=False, normalize_embeddings=True
        )
        return np.asarray(vectors, dtype=np.float32)


class OnnxEmbedder:
    """Vectors equal to those of `MiniLmEmbedder` to 1e-3 in cosine distance. `threads` None takes half of the cores.

    The graph is `embedder.onnx` in the model's folder, where `export_embedder` writes it; without one it is exported
    once, into the user's cache folder. Raises ConfigurationError without ONNX Runtime, without its CUDA part for
    `on_gpu`, or without the model's files on this machine.
    """

    def __init__(self, model: str | Path | None = None, *, on_gpu: bool = False, threads: int | None = None) -> None:
        name, extra = ("onnx_gpu", "onnx-gpu") if on_gpu else ("onnx", "onnx")
        try:
            import onnxruntime
        except ImportError:
            missing_extra(name, "onnxruntime", extra)
        provider = "CUDAExecutionProvider" if on_gpu else "CPUExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            missing_extra(name, f"onnxruntime with {provider}", extra)
        files = sentence_model(model, name, extra)
        self._tokenizer = tokenizer_file(files.folder)
        self._tokenizer.enable_truncation(WINDOW_TOKENS)
        self._tokenizer.enable_padding()
        self._cutter = tokenizer_file(files.folder)
        graph = files.folder / GRAPH_FILE
        if not graph.is_file():
            graph = cache_folder() / f"{files.digest}.onnx"
        if not graph.is_file():
            export(files, graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or max(1, (os.cpu_count() or 1) // 2)
        # A thread that spins while it waits would take a core from the engine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(str(graph), options, providers=[provider])
        except Exception as error:
            raise ConfigurationError(f"{graph} is no graph that ONNX Runtime can run: {error}; delete it") from error
        if self._session.get_providers()[0] != provider:
            missing_extra(
                name, f"a CUDA device and libraries that onnxruntime {onnxruntime.__version__} can use", extra
            )
        self.dim = int(self._embed_windows(["a"]).shape[1])

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors float32 [len(texts), dim] of unit length; a text without a word gets zeros."""
        return pooled(texts, self._cutter, self.dim, self._embed_windows)

    def _embed_windows(self, windows: list[str]) -> npt.NDArray[np.float32]:
        encodings = self._tokenizer.encode_batch(windows)
        ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64)
        (vectors,) = self._session.run([OUTPUT], dict(zip(INPUTS, (ids, mask), strict=True)))
        return np.asarray(vectors, dtype=np.float32)


def cache_folder() -> Path:
    """Where exported graphs are kept: `semblend_trt` in the user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "semblend_trt"


class PooledEncoder(torch.nn.Module):
    """The encoder, the mean over its tokens and the normalisation, as sentence-transformers runs them.

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
    """Silences the exporter, which logs every step."""
    names = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
