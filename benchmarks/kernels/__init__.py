"""Measures the kernels against the card's own ceilings; run as `python -m benchmarks.kernels.<operation>`."""
