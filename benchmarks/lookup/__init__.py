"""Measures look-ups of donors: exact runs, neighbours in meaning, and the published SemBlend package."""
