"""Measures the publisher, the directory, placement and a fleet of processes."""
