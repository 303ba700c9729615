"""Benchmarks of the connector's own parts; each is a program that prints a table and writes result rows."""
