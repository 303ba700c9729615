"""The files of a model: where they are, and digests that tell one model's from another's."""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.connector.file_digests import FileState, digest_of_files
from semblend_trt.errors import ConfigurationError
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from semblend_trt.connector.digest_cache import DigestCache

# Engines load the first kind that they find; which one that is does not matter when all of them count.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_INDEX = "*.index.json"
_CONFIGURATIONS = ("config.json", "config.*.json")
_QUANTISATIONS = ("*quant*.json", "dtypes.json")
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template*",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "tokenizer*",
    "*.tiktoken",
    "vocab.*",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local(model: str | Path) -> bool:
    """True for a directory, False for a hub id. Raises ConfigurationError for what can be neither."""
    if str(model) and Path(model).is_dir():
        return True
    if isinstance(model, str) and not Path(model).exists() and _HUB_ID.fullmatch(model):
        return False
    raise ConfigurationError(f"model {str(model)!r} is neither a directory that exists nor a hub id such as org/name")


def snapshot(model: str | Path, revision: str | None = None) -> Path | None:
    """The directory of `model`'s files on this machine: its own, or the hub cache's; None when there is none."""
    if is_local(model):
        return Path(model)
    cached_file = imported("cached_file", "transformers.utils")
    try:
        found = cached_file(str(model), "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def weights_digest(path: str | Path, cache: DigestCache | None = None) -> str:
    """Digest of every byte of a model directory's weights: whatever a loader may take for them, the indexes, and what
    those name.

    Raises ConfigurationError when there are no weights, or when one of their files cannot be read.
    """
    directory = Path(path)
    try:
        files = weight_files(directory)
        if not files:
            raise ConfigurationError(f"{directory} holds no weights ({', '.join(_WEIGHTS)})")
        return digest_of_files(files, cache)
    except OSError as error:
        place = error.filename or directory
        raise ConfigurationError(f"weights {place} cannot be read: {error.strerror or error}") from error


def weight_files(directory: Path) -> dict[str, Path]:
    """A directory's weights and their indexes by name. Raises OSError, and ConfigurationError for a broken index."""
    names = _names_in(directory, (*_WEIGHTS, _INDEX))
    for index in [name for name in names if fnmatchcase(name, _INDEX)]:
        try:
            named = json.loads(_regular_text(directory / index))["weight_map"]
            names += sorted(_plain(shard) for shard in set(named.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{directory / index} is no index of weights; download it again") from error
    return {name: directory / name for name in names}


def quantisation_digest(directory: Path) -> str | None:
    """Digest of a directory's files about quantisation, None when it has none. Raises OSError."""
    files = {name: directory / name for name in _names_in(directory, _QUANTISATIONS)}
    return digest_of_files(files) if files else None


def file_states(directory: Path) -> dict[str, FileState]:
    """The states of the files that make a directory's model, by name. Raises OSError and ConfigurationError."""
    files = {name: directory / name for name in _names_in(directory, (*_CONFIGURATIONS, *_QUANTISATIONS))}
    return {name: FileState.of(path) for name, path in {**files, **weight_files(directory)}.items()}


def adapter_digest(path: str | Path, cache: DigestCache | None = None) -> str:
    """Digest of every byte of a LoRA adapter, a file or a directory. Raises OSError and ConfigurationError."""
    return digest_of_files(_adapter_files(Path(path)), cache)


def adapter_states(path: str | Path) -> tuple[FileState, ...]:
    """The states of an adapter's files. Raises OSError and ConfigurationError."""
    return tuple(FileState.of(file) for file in _adapter_files(Path(path)).values())


def tokenizer_digest(directory: Path) -> str | None:
    """Digest of every byte of a directory's tokenizer files, None when it has none. Raises OSError."""
    files = {name: directory / name for name in _names_in(directory, _TOKENIZER_FILES)}
    return digest_of_files(files) if files else None


def _adapter_files(place: Path) -> dict[str, Path]:
    if not place.is_dir():
        return {place.suffix: place}
    weights = weight_files(place)
    if not weights:
        raise ConfigurationError(f"adapter {place} holds no weights ({', '.join(_WEIGHTS)})")
    return {**weights, **{name: place / name for name in _names_in(place, ("adapter_config.json",))}}


def _names_in(directory: Path, patterns: tuple[str, ...]) -> list[str]:
    """Names that fit a pattern, sorted; a link to nothing is among them, so that it is told and not passed over."""
    with os.scandir(directory) as entries:
        return sorted(
            entry.name
            for entry in entries
            if any(fnmatchcase(entry.name, pattern) for pattern in patterns) and not entry.is_dir()
        )


def _regular_text(path: Path) -> str:
    FileState.of(path)
    return path.read_text("utf-8")


def _plain(name: object) -> str:
    if not isinstance(name, str) or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    return name
