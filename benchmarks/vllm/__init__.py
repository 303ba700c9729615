"""Measures whole prompts in vLLM."""
