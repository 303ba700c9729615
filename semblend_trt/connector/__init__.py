"""The KvCacheConnector pair that TensorRT-LLM loads: `connector_module="semblend_trt.connector"`."""

from semblend_trt.connector.scheduler import SemBlendKvConnectorScheduler
from semblend_trt.connector.worker import SemBlendKvConnectorWorker

__all__ = ["SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker"]
