"""Measures the kernels against the card's own ceilings; run as `python -m kernels.benchmarks.<operation>`."""
