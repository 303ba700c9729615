"""The engine's arguments, named as in TensorRT-LLM's `llmapi/llm_args.py`. Unknown fields are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from semblend_trt.errors import ConfigurationError


class StrictModel(BaseModel):
    """Refuses unknown fields and wrong values by a ConfigurationError of one sentence."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            given = f" (given: {first['input']!r})" if where else ""
            sentence = f"{type(self).__name__}{'.' + where if where else ''}: {first['msg']}{given}"
            raise ConfigurationError(sentence.replace("Value error, ", "", 1)) from None


class KvCacheConfig(StrictModel):
    """The KV pool. `max_tokens` is its size, by default that of `block_manager.pool_of`. `dtype` is the model's or
    "fp8": e4m3 by a scale of 1, as in TensorRT-LLM for a checkpoint without scales (`llmapi/llm_args.py`)."""

    tokens_per_block: int = Field(default=32, ge=1, le=1024)
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    max_tokens: int | None = Field(default=None, ge=1)
    dtype: Literal["auto", "fp8"] = "auto"
    # The contract needs a block id to be its row in the pool; after a swap to host memory it is not.
    host_cache_size: Literal[0] = 0


class KvCacheConnectorConfig(StrictModel):
    """Names the connector's classes. Both are built with one positional argument, the LlmArgs."""

    connector_module: str = Field(min_length=1)
    connector_scheduler_class: str = Field(min_length=1)
    connector_worker_class: str = Field(min_length=1)

    @classmethod
    def ours(cls, module: str = "engine_wrapper.connector") -> KvCacheConnectorConfig:
        """Name our connector: the one that also executes plans, or the stock one of `semblend_trt.connector`."""
        return cls(
            connector_module=module,
            connector_scheduler_class="SemBlendKvConnectorScheduler",
            connector_worker_class="SemBlendKvConnectorWorker",
        )


class LlmArgs(StrictModel):
    """Everything that describes one engine.

    - `model`: a local folder or a hub id, also of the tokenizer.
    - `load_format`: "dummy" for weights that come from no file, such as those of a model in memory.
    - `max_seq_len`: the most tokens of a sequence, by default the model's context.
    - `max_num_tokens`: the most rows of one forward.
    - `lora_config`: adapter names and their task ids. The engine holds no adapter weights; a name only keeps the KV of
      its requests apart.
    - `disable_overlap_scheduler`: if off, an iteration's results are handled after the next one was launched.
    - `contract`: the version of TensorRT-LLM whose connector contract the engine follows, or "embedded" for its own.
      "1.2" has the V1 cache manager, and gives the connector's query V1's C++ request, another object than later calls
      get. "1.4" has V2: it allocates chunk by chunk, publishes prompts only, exchanges equal blocks, and pauses
      requests when blocks run out.
    - `transfer_timeout`: seconds to wait for a connector's saves when no request can run.
    """

    model: Annotated[str, BeforeValidator(lambda at: str(at) if isinstance(at, Path) else at)] = Field(min_length=1)
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_seq_len: int | None = Field(default=None, ge=2)
    max_num_tokens: int = Field(default=8192, ge=1)
    max_batch_size: int = Field(default=8, ge=1)
    enable_chunked_prefill: Literal[True] = True
    tensor_parallel_size: Literal[1] = 1
    pipeline_parallel_size: Literal[1] = 1
    context_parallel_size: Literal[1] = 1
    lora_config: dict[str, int] | None = None
    speculative_config: None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=lambda: KvCacheConfig())
    kv_connector_config: KvCacheConnectorConfig | None = None
    disable_overlap_scheduler: bool = True
    contract: Literal["1.2", "1.4", "embedded"] = "embedded"
    torch_compile_config: None = None
    transfer_timeout: float = Field(default=60.0, gt=0)
    attn_backend: ClassVar[str] = "TRTLLM"
    follows_transformers: ClassVar[bool] = True
    tells_kv_scales: ClassVar[bool] = False

    @property
    def is_v2(self) -> bool:
        """Whether the engine has the V2 cache manager and its capacity policy, MAX_UTILIZATION."""
        return self.contract == "1.4"

    @property
    def is_own(self) -> bool:
        """Whether the contract is ours: as 1.4 over V1, and `request_finished` comes for cut requests, too. A failed
        forward ends the engine, and decode steps run every hook. TensorRT-LLM replays recorded ones without hooks.
        There a failed forward ends the running requests alone; with V2 so without the overlap scheduler."""
        return self.contract == "embedded"

    @property
    def holds_saved_blocks(self) -> bool:
        """Whether the engine keeps an ended request's own blocks until its save has ended, under V1 too."""
        return self.is_own

    @model_validator(mode="after")
    def _budget_holds_a_batch(self) -> LlmArgs:
        block = self.kv_cache_config.tokens_per_block
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} is below max_batch_size {self.max_batch_size}; "
                "every running request needs one row"
            )
        if self.max_num_tokens < block:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} is below tokens_per_block {block}; "
                "a chunk of a prompt ends on a block boundary"
            )
        return self
