"""The files of a model: where they are, and digests that tell one model's from another's."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from semblend_trt.errors import ConfigurationError
from semblend_trt.transformers_version import imported

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


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


def commit_of(directory: Path) -> str | None:
    """The commit that a directory of the hub cache stands for; None for any other directory."""
    return directory.name if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name) else None


def weights_digest(path: str | Path) -> str:
    """Digest of a model directory's weight files: names, sizes, safetensors headers and samples of the data.

    64 evenly spaced samples of 4 KiB a file tell fine-tunes of one shape apart without reading every byte. Raises
    ConfigurationError when there are no weight files, or when one of them cannot be read or is cut short.
    """
    directory = Path(path)
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not files:
        raise ConfigurationError(f"{directory} holds no weights (*.safetensors or *.bin)")
    digest = hashlib.sha256()
    for file in files:
        try:
            _digest_weights(digest, file)
        except OSError as error:
            raise ConfigurationError(f"weights {file} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def tokenizer_digest(directory: Path) -> str | None:
    """Digest of a directory's tokenizer files, None when it has none of them."""
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.name}:{content}\n".encode())
    return digest.hexdigest()


def _digest_weights(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}\n".encode())
    with file.open("rb") as stream:
        start = 0
        if file.suffix == ".safetensors":
            # The header is JSON behind its length, a little-endian uint64 (safetensors format).
            length = int.from_bytes(stream.read(8), "little")
            start = 8 + length
            if start > size:
                raise ConfigurationError(f"weights {file} end before their header does; download them again")
            digest.update(stream.read(length))
        last = max(start, size - SAMPLE_BYTES)
        offsets = {start + (last - start) * index // (SAMPLES_PER_FILE - 1) for index in range(SAMPLES_PER_FILE)}
        for offset in sorted(offsets):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE_BYTES))
