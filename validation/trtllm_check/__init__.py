"""Runs the connector inside a real TensorRT-LLM, and says what holds there."""
