"""Measures the publisher, the directory, the router and a fleet of processes."""
