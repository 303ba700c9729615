"""Finds what one model may safely reuse, and writes it down as its reuse profile."""
