"""Measures what must never happen: wrong tokens, lost requests, leaks between tenants, hijacked answers."""
