"""Measures whole prompts in the embedded engine."""
