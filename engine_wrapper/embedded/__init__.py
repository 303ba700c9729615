"""An engine shaped like TensorRT-LLM's PyTorch executor over Hugging Face decoders, on CPU or CUDA."""
