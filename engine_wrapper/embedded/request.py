"""One request as the executor and the connector see it, with the attribute names of TensorRT-LLM's LlmRequest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_wrapper.embedded.radix_tree import RootKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from engine_wrapper.embedded.sampling import SamplingParams


class LlmRequestState(str, Enum):
    """Upstream's names. A request whose KV is loaded asynchronously "generates elsewhere", one being saved is
    "context in transmission"."""

    QUEUED = "queued"
    CONTEXT_INIT = "context_init"
    DISAGG_GENERATION_TRANS_IN_PROGRESS = "disagg_generation_trans_in_progress"
    GENERATION_IN_PROGRESS = "generation_in_progress"
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = "disagg_context_trans_in_progress"
    GENERATION_COMPLETE = "generation_complete"


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What a connector may ask about sampling: one beam, always."""

    beam_width: int = 1


class LlmRequest:
    """A prompt, the tokens generated so far, and how far the engine has come with it.

    `context_current_position` is the first prompt token not computed yet; `prepopulated_prompt_len` the tokens that
    were there at the start: `cached_tokens` from the reuse tree, then `py_num_connector_matched_tokens`.
    `prompt_token_array`, int32 [prompt_len], is ours: a list of that length is slow to read. Where the caller has both,
    the list becomes the request's own. `pending_token` was sampled and is not handled yet. `arrival_time` is on the
    clock of `time.perf_counter`, now by default.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_new_tokens: int,
        prompt_token_array: npt.NDArray[np.int32] | None = None,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
        lora_path: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.py_request_id = request_id
        self.client_id = request_id
        self.prompt_len = len(prompt_token_ids)
        self.py_prompt_len = self.prompt_len
        self.orig_prompt_len = self.prompt_len
        self.max_new_tokens = max_new_tokens
        self.cache_salt = cache_salt
        self.cache_salt_id = _salt_id(cache_salt)
        self.lora_task_id = lora_task_id
        self.py_lora_path = lora_path
        self.multimodal_hashes = None
        self.kv_cache_retention_config = None
        self.is_dummy_request = False
        self.sampling_config = SamplingConfig()
        self.sampling_params = sampling_params
        self.state = LlmRequestState.QUEUED
        self.context_current_position = 0
        self.context_chunk_size = 0
        self.chunk_allowance = 0
        self.prepopulated_prompt_len = 0
        self.cached_tokens = 0
        self.py_num_connector_matched_tokens = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.reuse_report: Any = None
        self.generator: torch.Generator | None = None
        self.pending_token: int | None = None
        self.is_paused = False
        self.generation_logits: list[torch.Tensor] = []
        self.arrival_time = perf_counter() if arrival_time is None else arrival_time
        self.first_token_time: float | None = None
        if prompt_token_array is None:
            prompt_token_array = np.array(prompt_token_ids, dtype=np.int32)
            prompt_token_ids = prompt_token_array.tolist()
        self.prompt_token_array = prompt_token_array
        self._tokens: list[int] = prompt_token_ids

    def get_tokens(self, beam: int = 0) -> list[int]:  # noqa: ARG002 - upstream's signature; there is one beam
        """Prompt and generated tokens."""
        return list(self._tokens)

    def get_token(self, beam: int, position: int) -> int:  # noqa: ARG002
        return self._tokens[position]

    def get_num_tokens(self, beam: int = 0) -> int:  # noqa: ARG002
        return len(self._tokens)

    def tokens(self, begin: int, end: int) -> list[int]:
        return self._tokens[begin:end]

    @property
    def all_tokens(self) -> Sequence[int]:
        """What `get_tokens` copies: to be read only, and not to be kept."""
        return self._tokens

    def token_array(self, end: int) -> npt.NDArray[np.int32]:
        """The first `end` tokens, int32 [end]; those of the prompt alone are not copied."""
        if end <= self.prompt_len:
            return self.prompt_token_array[:end]
        generated = np.array(self._tokens[self.prompt_len : end], dtype=np.int32)
        return np.concatenate([self.prompt_token_array, generated])

    def add_new_token(self, token: int) -> None:
        self._tokens.append(token)

    def is_generation_only_request(self) -> bool:
        """False: a method, as in upstream's Python subclass."""
        return False

    @property
    def is_context_only_request(self) -> bool:
        return False

    @property
    def root_key(self) -> RootKey:
        return RootKey(self.lora_task_id, self.cache_salt)

    @property
    def num_generated(self) -> int:
        return len(self._tokens) - self.orig_prompt_len

    @property
    def generated_token_ids(self) -> list[int]:
        return self._tokens[self.orig_prompt_len :]

    @property
    def max_total_tokens(self) -> int:
        return self.orig_prompt_len + self.max_new_tokens

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size == self.prompt_len

    @property
    def num_written_tokens(self) -> int:
        """Leading tokens whose KV is written: never the newest generated one."""
        return self.context_current_position if len(self._tokens) == self.prompt_len else len(self._tokens) - 1

    @property
    def is_finished(self) -> bool:
        """The answer is complete; blocks may still be held for a save."""
        return self.finish_reason is not None

    def set_prepopulated_prompt_len(self, cached: int, connector_matched: int) -> None:
        """Tells how many leading tokens need not be scheduled: from the reuse tree, then from the connector."""
        self.cached_tokens = cached
        self.py_num_connector_matched_tokens = connector_matched
        self.prepopulated_prompt_len = self.context_current_position = cached + connector_matched

    def next_row(self) -> tuple[int, int]:
        """Position and token of the row that generation computes next."""
        if self.pending_token is not None:
            return len(self._tokens), self.pending_token
        return len(self._tokens) - 1, self._tokens[-1]

    def pause(self) -> None:
        """Its blocks are gone: what was generated becomes part of the prompt, which is computed anew."""
        self.prompt_token_array = self.token_array(len(self._tokens))
        self.prompt_len = self.py_prompt_len = len(self._tokens)
        self.context_chunk_size = 0
        self.set_prepopulated_prompt_len(0, 0)
        self.state = LlmRequestState.QUEUED
        self.is_paused = True


def _salt_id(cache_salt: str | None) -> int | None:
    if cache_salt is None:
        return None
    digest = hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")
