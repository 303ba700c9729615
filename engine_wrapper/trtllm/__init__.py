"""Attaching to TensorRT-LLM's PyTorch executor. Nothing here imports tensorrt_llm: its objects are met as they are."""
