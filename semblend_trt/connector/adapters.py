"""Adapters: who an engine's LoRA adapters are, by their content."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.digest_cache import DigestCache
from semblend_trt.connector.model_files import adapter_digest, adapter_states
from semblend_trt.errors import ConfigurationError
from semblend_trt.namespace import content_value, unknown_value

if TYPE_CHECKING:
    from semblend_trt.connector.file_digests import FileState

logger = logging.getLogger(__name__)

# An engine holds far fewer; requests may name as many as they like.
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter that was read at the start: its identity, and the states of its files."""

    identity: str
    states: tuple[FileState, ...]


class Adapters:
    """The adapters of `llm_args`' lora_config.lora_dir are read when this is made; requests read nothing.

    An adapter that first comes with a request has an identity of its own, for the life of this engine.
    """

    def __init__(self, llm_args: Any, cache_path: Path | None = None) -> None:
        folders = getattr(getattr(llm_args, "lora_config", None), "lora_dir", None) or ()
        cache = DigestCache.from_setting(cache_path)
        self._read = {_place(folder): _known(str(folder), cache) for folder in folders}
        self._of_task: dict[int, tuple[str | None, str]] = {}

    @property
    def identities(self) -> list[str]:
        """Of the adapters that the engine was started with: their embeddings may stand for the base model's."""
        return [known.identity for known in self._read.values()]

    def of(self, request: Any) -> str | None:
        """The identity of the request's adapter, None for the base model.

        The engine keeps the first adapter that it sees under a task id. One that comes under it from elsewhere matches
        nothing.
        """
        task = getattr(request, "lora_task_id", None)
        if task is None:
            return None
        path = getattr(request, "py_lora_path", None)
        if task not in self._of_task:
            if len(self._of_task) >= MAX_REMEMBERED:
                return unknown_value()
            self._of_task[task] = (path, self._identity(path))
        seen, identity = self._of_task[task]
        return identity if path == seen else unknown_value()

    def _identity(self, path: str | None) -> str:
        known = None if path is None else self._read.get(_place(path))
        if known is None or path is None:
            return unknown_value()
        try:  # the engine reads it about now
            return known.identity if adapter_states(path) == known.states else unknown_value()
        except (OSError, ConfigurationError):
            return unknown_value()


def _place(path: str | Path) -> str:
    return str(Path(path).absolute())


def _known(folder: str, cache: DigestCache | None) -> _Known:
    try:
        states = adapter_states(folder)
        return _Known(content_value(adapter_digest(folder, cache)), states)
    except (OSError, ConfigurationError) as error:
        logger.warning("adapter %s cannot be read, and its KV is shared with no other engine: %s", folder, error)
        return _Known(unknown_value(), ())
