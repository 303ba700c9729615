"""What the embedded engine plays: TensorRT-LLM's connector contract of 1.2, that of main, and one of its own.

Facts: NVIDIA/TensorRT-LLM, under `_torch/pyexecutor/`: `kv_cache_connector.py` (1.2) and
`connectors/kv_cache_connector.py` (main).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from semblend_trt.connector.contract import RequestData, ScheduledRequest, SchedulerOutput

# Bound by nanobind; what V1 hands to the query has these and nothing else.
_BOUND_ATTRIBUTES = (
    "request_id get_tokens get_token get_num_tokens prompt_len orig_prompt_len max_new_tokens state "
    "context_current_position context_chunk_size context_remaining_length is_first_context_chunk "
    "is_last_context_chunk prepopulated_prompt_len lora_task_id multimodal_hashes sampling_config "
    "is_context_only_request is_generation_only_request is_dummy_request client_id"
)
BOUND_ATTRIBUTES = frozenset(_BOUND_ATTRIBUTES.split())


@dataclass(slots=True)
class SchedulerOutputV12:
    """What one iteration runs, as 1.2 tells it: requests seen for the first time, and requests seen before."""

    new_requests: list[ScheduledRequest] = field(default_factory=list)
    cached_requests: list[ScheduledRequest] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Contract:
    """One contract: what the engine tells a connector, and how the engine behaves.

    `request_attributes` are what the query can read of a request under the V1 cache manager, which hands it another
    object than the later calls. The rest:

    - `waits_for_initialization`: the scheduler is called once after the caches are registered.
    - `floors_local_match`: V1 tells the query of whole shared blocks only.
    - `asks_without_reuse`: with block reuse off, V1 still asks for tokens, and applies none of the offer.
    - `tells_cut_short`: `request_finished` is called for a request that fails or is cancelled; otherwise it just
      disappears.
    - `survives_failed_forward`: an error in a forward ends all running requests with an error, and the engine lives on.
    - `defers_cancel`: the blocks of a cancelled request are held while a load into them is under way.
    - `flashinfer_layout`: the order of heads and tokens in a block of the attention backend FLASHINFER.
    - `allows_v2`: a connector may be attached to the V2 cache manager; otherwise the engine takes V1.
    """

    name: str
    request_data: type[ScheduledRequest]
    scheduler_output: type[SchedulerOutputV12] | type[SchedulerOutput]
    request_attributes: frozenset[str]
    waits_for_initialization: bool
    floors_local_match: bool
    asks_without_reuse: bool
    tells_cut_short: bool
    survives_failed_forward: bool
    defers_cancel: bool
    flashinfer_layout: str
    allows_v2: bool

    @property
    def request_fields(self) -> tuple[str, ...]:
        """The fields of `request_data`, in order."""
        return tuple(each.name for each in fields(self.request_data))


V12 = Contract(
    name="1.2",
    request_data=ScheduledRequest,
    scheduler_output=SchedulerOutputV12,
    request_attributes=BOUND_ATTRIBUTES | {"cache_salt_id"},
    waits_for_initialization=False,
    floors_local_match=False,
    asks_without_reuse=False,
    tells_cut_short=False,
    survives_failed_forward=True,
    defers_cancel=False,
    flashinfer_layout="NHD",
    allows_v2=False,
)
MAIN = replace(
    V12,
    name="main",
    request_data=RequestData,
    scheduler_output=SchedulerOutput,
    request_attributes=BOUND_ATTRIBUTES | {"cache_salt", "kv_cache_retention_config"},
    waits_for_initialization=True,
    floors_local_match=True,
    asks_without_reuse=True,
    defers_cancel=True,
    flashinfer_layout="HND",
    allows_v2=True,
)
# What the engine does by default: as main, but it tells parts of blocks and every end, hands over prompts as arrays,
# which are faster to read, and tells which requests are to be exact.
EMBEDDED = replace(
    MAIN,
    name="embedded",
    request_attributes=MAIN.request_attributes | {"cache_salt_id", "token_array", "exact_only", "cold"},
    floors_local_match=False,
    asks_without_reuse=False,
    tells_cut_short=True,
    survives_failed_forward=False,
)

CONTRACTS = {contract.name: contract for contract in (V12, MAIN, EMBEDDED)}
