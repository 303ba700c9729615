"""Measures the commands `calibrate`, `confirm` and `estimate`."""
