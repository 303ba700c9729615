"""Measures the embedded engine end to end; run as `python -m validation.benchmarks.ttft`."""
