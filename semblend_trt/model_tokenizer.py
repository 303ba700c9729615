"""The installed Transformers: its names, for any thread, and its tokenizers by the rules of their own files."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

# The oldest that the embedded engine runs with.
MIN_TRANSFORMERS = Version("5.0")
_lock = threading.Lock()


def imported(name: str, module: str = "transformers") -> Any:
    """Import `name` from Transformers, or from a package that imports it. Raises ImportError. Any thread may ask first.

    Transformers replaces its module at the end of its import: an import statement waiting in another thread gets the
    first module, which lacks the names."""
    with _lock:
        return getattr(importlib.import_module(module), name)


def embedded_engine_refusal() -> str | None:
    """Return why the embedded engine does not run with this Transformers. The connector works with older ones too."""
    version = imported("__version__")
    if Version(version) >= MIN_TRANSFORMERS:
        return None
    return (
        f"Transformers {version} is installed; the embedded engine and the validation need {MIN_TRANSFORMERS} or "
        "later: pip install 'semblend-trt[embedded]'. The connector alone works without"
    )


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Load the Transformers tokenizer of a folder or a hub id. Raises ConfigurationError without a readable one."""
    auto_tokenizer, fast_tokenizer = imported("AutoTokenizer"), imported("PreTrainedTokenizerFast")
    try:
        tokenizer = auto_tokenizer.from_pretrained(name, revision=revision)
        if _breaks_own_rules(tokenizer, name, revision):
            tokenizer = fast_tokenizer.from_pretrained(name, revision=revision)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ConfigurationError(f"tokenizer {name} cannot be read: {reason_of(error)}") from error
    # Without its files Transformers makes an empty tokenizer of the model's type.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ConfigurationError(f"tokenizer {name} has no vocabulary; the folder lacks its tokenizer files")
    return tokenizer


def tokenizer_file(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer.json, set to neither cut nor pad. Raises ConfigurationError without a readable one."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(read_input(path))
    except Exception as error:
        raise ConfigurationError(f"the tokenizer {path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def reason_of(error: Exception) -> str:
    """Return the first line of another package's message: the others are advice to its own users."""
    return next((line.strip(" :") for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _breaks_own_rules(tokenizer: Any, name: str, revision: str | None) -> bool:
    """Return whether `tokenizer` reads text otherwise than the tokenizer.json of `name`, which its model has learnt."""
    # Transformers builds some (Qwen2's) from the model's type, and takes only the vocabulary from the file.
    from tokenizers import Tokenizer

    cached_file = imported("cached_file", "transformers.utils")
    path = cached_file(name, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    used = getattr(tokenizer, "backend_tokenizer", None)
    if path is None or used is None:
        return False
    parts = [(each.normalizer, each.pre_tokenizer) for each in (used, Tokenizer.from_file(path))]
    ours, theirs = ([None if part is None else part.__getstate__() for part in each] for each in parts)
    return ours != theirs
