"""Finds token-identical runs of a prompt in donors of the same namespace and plans their reuse."""
