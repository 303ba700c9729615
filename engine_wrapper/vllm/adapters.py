"""vLLM's LoRA adapters in one model runner: which weights each id has, and which rows of a forward get which adapter.

An id says little: vLLM loads another adapter in the place of one, and reads an adapter's files again after it has
dropped it. So KV belongs to an adapter's name and to a digest of what vLLM has loaded.

Facts: vLLM (0.28 to 0.33), `lora/model_manager.py` (`list_adapters`; `set_adapter_mapping` does nothing for the mapping
that is set), `lora/lora_model.py`, and `v1/worker/lora_model_runner_mixin.py`: both runners set the step's mapping
before they bind a step's metadata."""

from __future__ import annotations

import hashlib
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.lora.layers import LoRAMapping

from engine_wrapper.vllm.hooks import adapters_of, set_adapters
from semblend_trt.errors import LayoutError
from semblend_trt.runtime import AdapterWeights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine_wrapper.vllm.scheduler import Scheduled
    from kernels.sparse_prefill import SequenceRows


class LoadedAdapters:
    """The adapters of a model runner. `manager`: its `lora_manager`; `known`: by id, what `read` has found so far."""

    def __init__(self, manager: Any, known: dict[int, AdapterWeights]) -> None:
        """Raises LayoutError `lora` for a manager of another kind."""
        self._manager = adapters_of(manager)
        if self._manager is None:
            raise LayoutError("lora", f"adapters are held by a {type(manager).__name__}, which is not known here")
        self._known = known
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._of_block: dict[int, int] = {}

    def read(self) -> None:
        """Note the weights of each adapter that vLLM has loaded since the last call. Reads those whole, on the host."""
        for number, model in self._manager.list_adapters().items():
            if number in self._seen and self._seen[number]() is model:
                continue
            self._seen[number] = weakref.ref(model)
            digest, before = _digest(model), self._known.get(number)
            if before is None or before.digest != digest:
                self._known[number] = AdapterWeights(digest, 0 if before is None else before.changes + 1)

    def begin(self, step: Mapping[str, Scheduled]) -> None:
        """Learn the adapters of a step's requests. Requests that share a block share their adapter."""
        self._of_block = {each.block_ids[0]: each.adapter for each in step.values() if each.block_ids}

    @contextmanager
    def own_rows(self, *, logits_follow: bool) -> Iterator[None]:
        """Leave vLLM's mapping as the step has it. Logits need that of its requests alone: if they follow a block that
        ended well, rows get the same one, which a next step that decodes finds set."""
        mapping = self._manager._last_mapping
        try:
            yield
            if logits_follow:
                mapping = replace(mapping, index_mapping=mapping.prompt_mapping)
        finally:
            set_adapters(self._manager, mapping)

    def map_rows(self, sequences: Sequence[SequenceRows]) -> int:
        """Give the rows of each sequence its request's adapter; return how many kinds of rows vLLM's kernels then tell
        apart, 0 without adapters. Raises KeyError for blocks of no request of the step."""
        adapters = [self._of_block[int(each.host_block_ids[0])] for each in sequences]
        return self._map(adapters, [each.count for each in sequences])

    def map_none(self, rows: int) -> None:
        """Give this number of rows no adapter."""
        self._map([0], [rows])

    def _map(self, adapters: list[int], counts: list[int]) -> int:
        rows = tuple(np.repeat(adapters, counts).tolist())
        set_adapters(self._manager, LoRAMapping(rows, tuple(adapters), is_prefill=True))
        return len({*adapters}) if any(adapters) else 0  # rows of the base model are a kind of their own


def _digest(model: Any) -> str:
    """A digest of all weights of a loaded adapter, with their names, dtypes, shapes and factors."""
    found = hashlib.blake2b(digest_size=16)
    for name, layer in sorted(model.loras.items()):
        found.update(f"{name} {layer.rank} {layer.scaling}\n".encode())
        for kind, held in (("lora_a", layer.lora_a), ("lora_b", layer.lora_b)):
            for each in held if isinstance(held, (list, tuple)) else (held,):
                if isinstance(each, torch.Tensor):
                    found.update(f"{kind} {each.dtype} {tuple(each.shape)}\n".encode())
                    found.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
                else:
                    found.update(f"{kind} {each}\n".encode())
    return found.hexdigest()
