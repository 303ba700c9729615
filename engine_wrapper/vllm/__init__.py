"""SemBlend inside vLLM: `"kv_connector": "SemBlendConnector", "kv_connector_module_path": "engine_wrapper.vllm"`."""

from engine_wrapper.vllm.connector import SemBlendConnector

__all__ = ["SemBlendConnector"]
