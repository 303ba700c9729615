"""An engine shaped like TensorRT-LLM's PyTorch executor over Hugging Face decoders, on CPU or CUDA."""

from engine_wrapper.embedded.llm import (
    LLM,
    CompletionOutput,
    KvCacheConfig,
    KvCacheConnectorConfig,
    LlmArgs,
    RequestOutput,
    SamplingParams,
)
from engine_wrapper.embedded.model_runner import ModelRunner

__all__ = [
    "LLM",
    "CompletionOutput",
    "KvCacheConfig",
    "KvCacheConnectorConfig",
    "LlmArgs",
    "ModelRunner",
    "RequestOutput",
    "SamplingParams",
]
